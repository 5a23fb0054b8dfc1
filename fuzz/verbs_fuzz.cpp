// The verbs of 1.2 under structured random arguments. On layers of plain floats they agree with the
// slow provider's v1 calls byte for byte; on pages of quantised rows an append in one call writes
// the bytes of an append token by token, and a transcode gives the rows of a gather. A call that
// fails changes no byte.
#include "fuzz/verb_layers.hpp"

namespace kvx::fuzz {
namespace {

// Rows of key and value, as 1.2's rows and as a v1 IO descriptor over the same memory.
struct Rows {
  Rows(Choices& choices, const Shape& s, int64_t tokens, uint32_t seed) {
    io = sized<kvx_kv_io_desc_t>();
    io.num_tokens = static_cast<uint32_t>(tokens);
    io.num_kv_heads = s.num_heads;
    io.head_dim = s.head_dim;
    for (kvx_tensor_desc_t* tensor : {&io.key, &io.value}) {
      set_tensor(choices, *tensor, {tokens, s.num_heads, s.head_dim});
      tensor->dtype = choices.pick(kReference);
      const bool is_key = tensor == &io.key;
      std::vector<uint8_t>& bytes = is_key ? key : value;
      fill(bytes, bytes_taken(*tensor, kMostVerbBytes), seed++, false);
      tensor->data = bytes.data();
      (is_key ? k : v) = {sizeof(kvx_rows_t), static_cast<uint32_t>(tensor->dtype), tensor->data,
                          tensor->stride[0], tensor->stride[1]};
    }
  }
  Rows(const Rows&) = delete;

  kvx_kv_io_desc_t io;
  kvx_rows_t k;
  kvx_rows_t v;
  std::vector<uint8_t> key;
  std::vector<uint8_t> value;
};

class Case {
 public:
  explicit Case(FuzzedDataProvider& data) : choices_(data) {
    shape_ = {static_cast<uint32_t>(choices_.between(1, 4)),
              static_cast<uint32_t>(choices_.between(1, 6)),
              static_cast<uint32_t>(choices_.between(1, 3)),
              static_cast<uint32_t>(choices_.between(1, 20))};
  }

  void run() {
    switch (choices_.between(0, 4)) {
      case 0:
        return append_floats();
      case 1:
        return gather_floats();
      case 2:
        return transcode_floats();
      case 3:
        return copy_float_blocks();
      default:
        return quantised_pages();
    }
  }

 private:
  std::vector<int64_t> some_slots(const Shape& s, int64_t count) {
    std::vector<int64_t> slots;
    for (int64_t t = 0; t < count; ++t) {
      slots.push_back(choices_.rarely_extreme(choices_.between(-1, s.num_slots() - 1)));
    }
    return slots;
  }

  static kvx_write_desc_t slow_write(const Rows& rows, const std::vector<int64_t>& slots) {
    auto write = sized<kvx_write_desc_t>();
    write.io = rows.io;
    write.slots = {sizeof write.slots, KVX_DTYPE_S64, rows.io.num_tokens, -1, slots.data()};
    return write;
  }

  void append_floats() {
    FloatLayer layer(choices_, shape_, 1);
    const int64_t count = choices_.between(0, 9);
    const Rows rows(choices_, shape_, count, 5);
    std::vector<int64_t> slots = some_slots(shape_, count);
    IndexList list;
    list.entries = slots;
    uint64_t beyond = 0;
    auto args = sized<kvx_append_args_t>();
    args.layer = &layer.layer;
    args.k = &rows.k;
    args.v = &rows.v;
    args.slot_dtype = static_cast<uint32_t>(choices_.pick(kIndices));
    args.slots = list.as(static_cast<kvx_dtype_t>(args.slot_dtype));
    args.num_tokens = count;
    if (choices_.flip()) args.out_of_range_slots = &beyond;
    const auto k = layer.k, v = layer.v;
    const kvx_status_t status = kvx_append(&args, nullptr);
    const auto k_after = layer.k, v_after = layer.v;
    if (status != KVX_STATUS_OK) {
      expect(k_after == k && v_after == v, "a failed append changes nothing");
      return;
    }
    std::copy(k.begin(), k.end(), layer.k.begin());
    std::copy(v.begin(), v.end(), layer.v.begin());
    uint64_t expected_beyond = 0;
    for (int64_t& slot : slots) {
      if (args.slot_dtype == KVX_DTYPE_S32) slot = static_cast<int32_t>(slot);
      if (slot < shape_.num_slots()) continue;
      slot = -1;
      ++expected_beyond;
    }
    expect(expected_beyond == beyond, "slots beyond the layer are counted");
    const kvx_write_desc_t write = slow_write(rows, slots);
    const kvx_status_t slow = slow_write_kv(&layer.cache, &write, nullptr);
    if (slow == KVX_STATUS_UNSUPPORTED) return;  // v1 supports fewer strides of IO
    expect(slow == KVX_STATUS_OK, "the slow write works");
    expect(layer.k == k_after && layer.v == v_after, "append and the slow write agree");
  }

  void gather_floats() {
    const FloatLayer layer(choices_, shape_, 1);
    const int64_t sequences = choices_.between(1, 3), width = choices_.between(1, 3);
    const int64_t most = width * shape_.block_size;
    Rows rows(choices_, shape_, sequences * most, 5);
    IndexList blocks, lengths;
    for (int64_t i = 0; i < sequences * width; ++i) {
      blocks.entries.push_back(choices_.rarely_extreme(choices_.between(0, shape_.num_blocks - 1)));
    }
    std::vector<int32_t> numbers;
    std::vector<int64_t> first_tokens, first_rows;
    for (int64_t s = 0; s < sequences; ++s) {
      lengths.entries.push_back(choices_.rarely_extreme(choices_.between(0, most)));
      numbers.push_back(static_cast<int32_t>(s));
      first_tokens.push_back(0);
      first_rows.push_back(s * most);
    }
    auto table = sized<kvx_block_table_t>();
    table.format = KVX_BLOCK_TABLE_PACKED;
    table.index_dtype = choices_.pick(kIndices);
    table.seq_count = static_cast<uint32_t>(sequences);
    table.beam_width = 1;
    table.max_blocks_per_seq = static_cast<uint32_t>(width);
    table.indices = blocks.as(table.index_dtype);
    table.indices_count = static_cast<uint32_t>(blocks.entries.size());
    kvx_seq_lens_t seq_lens = {sizeof seq_lens, choices_.pick(kIndices), table.seq_count, nullptr};
    seq_lens.lengths = lengths.as(seq_lens.dtype);
    auto args = sized<kvx_gather_args_t>();
    args.layer = &layer.layer;
    args.block_table = &table;
    args.seq_lens = &seq_lens;
    args.num_ranges = table.seq_count;
    args.sequences = numbers.data();
    args.first_tokens = first_tokens.data();
    args.num_tokens = lengths.entries.data();
    args.first_rows = first_rows.data();
    args.k = &rows.k;
    args.v = &rows.v;
    const auto key = rows.key, value = rows.value;
    const kvx_status_t status = kvx_gather(&args, nullptr);
    const auto key_after = rows.key, value_after = rows.value;
    if (status != KVX_STATUS_OK) {
      expect(key_after == key && value_after == value, "a failed gather changes nothing");
      return;
    }
    std::copy(key.begin(), key.end(), rows.key.begin());
    std::copy(value.begin(), value.end(), rows.value.begin());
    auto gather = sized<kvx_gather_desc_t>();
    gather.io = rows.io;
    gather.block_table = table;
    gather.seq_lens = seq_lens;
    gather.max_seq_len = static_cast<uint32_t>(most);
    const kvx_status_t slow = slow_gather_kv(&layer.cache, &gather, nullptr);
    if (slow == KVX_STATUS_UNSUPPORTED) return;  // v1 supports fewer strides of IO
    expect(slow == KVX_STATUS_OK, "the slow gather works");
    expect(rows.key == key_after && rows.value == value_after, "gather and the slow gather agree");
  }

  // Tokens of one float layer in another, by the slow provider: gathered one by one, then written.
  void move_slowly(const FloatLayer& from, FloatLayer& to, const std::vector<int64_t>& from_slots,
                   const std::vector<int64_t>& to_slots) {
    for (size_t t = 0; t < from_slots.size(); ++t) {
      if (from_slots[t] < 0 || to_slots[t] < 0) continue;
      auto io = sized<kvx_kv_io_desc_t>();
      io.num_tokens = from.cache.block_size;
      io.num_kv_heads = from.cache.num_kv_heads;
      io.head_dim = from.cache.head_dim;
      std::vector<uint8_t> rows[2];
      for (int side = 0; side < 2; ++side) {
        kvx_tensor_desc_t& tensor = side == 0 ? io.key : io.value;
        tensor = (side == 0 ? from.cache.k : from.cache.v);
        const int64_t h = io.num_kv_heads, d = io.head_dim;
        tensor.ndim = 3;
        const int64_t shape[] = {io.num_tokens, h, d}, stride[] = {h * d, d, 1};
        std::copy(shape, shape + 3, tensor.shape);
        std::copy(stride, stride + 3, tensor.stride);
        rows[side].resize(static_cast<size_t>(io.num_tokens * h * d * bytes_of(tensor.dtype)));
        tensor.data = rows[side].data();
      }
      const auto block = static_cast<int32_t>(from_slots[t] / from.cache.block_size);
      const auto length = static_cast<int32_t>(from.cache.block_size);
      auto gather = sized<kvx_gather_desc_t>();
      gather.io = io;
      gather.max_seq_len = from.cache.block_size;
      gather.block_table = api::packed_table({&block, 1}, 1);
      gather.seq_lens = api::seq_lens({&length, 1});
      expect(slow_gather_kv(&from.cache, &gather, nullptr) == KVX_STATUS_OK, "a block is gathered");
      // All its tokens but one go nowhere.
      std::vector<int64_t> slots(from.cache.block_size, -1);
      slots[static_cast<size_t>(from_slots[t] % from.cache.block_size)] = to_slots[t];
      auto write = sized<kvx_write_desc_t>();
      write.io = io;
      write.slots = {sizeof write.slots, KVX_DTYPE_S64, io.num_tokens, -1, slots.data()};
      expect(slow_write_kv(&to.cache, &write, nullptr) == KVX_STATUS_OK, "a token is written");
    }
  }

  // `call` works on `to`; the slow provider then does the same to what stood there before.
  template <class Call>
  void compare_moves(const FloatLayer& from, FloatLayer& to, const std::vector<int64_t>& from_slots,
                     const std::vector<int64_t>& to_slots, const Call& call) {
    const auto k = to.k, v = to.v;
    const kvx_status_t status = call();
    const auto k_after = to.k, v_after = to.v;
    if (status != KVX_STATUS_OK) {
      expect(k_after == k && v_after == v, "a failed move changes nothing");
      return;
    }
    std::copy(k.begin(), k.end(), to.k.begin());
    std::copy(v.begin(), v.end(), to.v.begin());
    move_slowly(from, to, from_slots, to_slots);
    expect(to.k == k_after && to.v == v_after, "a move and the slow provider agree");
  }

  void transcode_floats() {
    const FloatLayer from(choices_, shape_, 1);
    Shape other = shape_;
    other.num_blocks = static_cast<uint32_t>(choices_.between(1, 4));
    other.block_size = static_cast<uint32_t>(choices_.between(1, 6));
    FloatLayer to(choices_, other, 7);
    const int64_t count = choices_.between(0, 8);
    const std::vector<int64_t> from_slots = some_slots(shape_, count);
    const std::vector<int64_t> to_slots = some_slots(other, count);
    auto args = sized<kvx_transcode_args_t>();
    args.from = &from.layer;
    args.to = &to.layer;
    args.slot_dtype = KVX_DTYPE_S64;
    args.num_tokens = count;
    args.from_slots = from_slots.data();
    args.to_slots = to_slots.data();
    compare_moves(from, to, from_slots, to_slots, [&] { return kvx_transcode(&args, nullptr); });
  }

  void copy_float_blocks() {
    const FloatLayer from(choices_, shape_, 1);
    Shape other = shape_;
    other.num_blocks = static_cast<uint32_t>(choices_.between(1, 4));
    FloatLayer to(choices_, other, 7);
    std::vector<int64_t> from_blocks, to_blocks, from_slots, to_slots;
    std::vector<int32_t> tokens;
    const int64_t most = std::min<int64_t>(other.num_blocks, 3);
    const int64_t count = choices_.between(0, most);
    for (int64_t i = 0; i < count; ++i) {
      from_blocks.push_back(choices_.rarely_extreme(choices_.between(0, shape_.num_blocks - 1)));
      to_blocks.push_back(choices_.rarely_extreme(i));  // each target once
      tokens.push_back(static_cast<int32_t>(choices_.between(0, shape_.block_size)));
      const bool is_there = from_blocks.back() >= 0 && from_blocks.back() < shape_.num_blocks &&
                            to_blocks.back() >= 0 && to_blocks.back() < other.num_blocks;
      for (int64_t t = 0; is_there && t < tokens.back(); ++t) {
        from_slots.push_back(from_blocks.back() * shape_.block_size + t);
        to_slots.push_back(to_blocks.back() * shape_.block_size + t);
      }
    }
    auto args = sized<kvx_copy_args_t>();
    args.from = &from.layer;
    args.to = &to.layer;
    args.num_copies = static_cast<uint32_t>(count);
    args.from_blocks = from_blocks.data();
    args.to_blocks = to_blocks.data();
    args.num_tokens = tokens.data();
    compare_moves(from, to, from_slots, to_slots, [&] { return kvx_copy_blocks(&args, nullptr); });
  }

  // --- quantised pages ---

  void quantised_pages() {
    const kvx_format_spec_t k_spec = some_format(choices_), v_spec = some_format(choices_);
    shape_.block_size = static_cast<uint32_t>(choices_.between(1, 2)) * 4;
    shape_.head_dim = static_cast<uint32_t>(choices_.between(1, 5)) * 16;
    auto page = sized<kvx_page_desc_t>();
    page.block_size = shape_.block_size;
    page.k_head_dim = page.v_head_dim = shape_.head_dim;
    page.k_spec = &k_spec;
    page.v_spec = &v_spec;
    Pages at_once, one_by_one;
    if (!at_once.describe(page, shape_)) return;
    one_by_one.describe(page, shape_);
    const int64_t count = choices_.between(1, std::min<int64_t>(9, shape_.num_slots()));
    const Rows rows(choices_, shape_, count, 5);
    std::vector<int64_t> slots;
    const int64_t first = choices_.between(0, shape_.num_slots() - count);
    for (int64_t t = 0; t < count; ++t) slots.push_back(first + t);
    auto args = sized<kvx_append_args_t>();
    args.slot_dtype = KVX_DTYPE_S64;
    args.layer = &at_once.layer;
    args.k = &rows.k;
    args.v = &rows.v;
    args.slots = slots.data();
    args.num_tokens = count;
    expect(kvx_append(&args, nullptr) == KVX_STATUS_OK, "pages take rows");
    for (int64_t t = 0; t < count; ++t) append_token(one_by_one.layer, rows, slots, t);
    expect(at_once.memory == one_by_one.memory, "append at once is append token by token");
    transcode_pages(at_once.layer, slots);
  }

  static void append_token(const kvx_layer_t& layer, const Rows& rows,
                           const std::vector<int64_t>& slots, int64_t t) {
    kvx_rows_t k = rows.k, v = rows.v;
    k.data = static_cast<uint8_t*>(k.data) + t * k.token_stride * bytes_of(rows.io.key.dtype);
    v.data = static_cast<uint8_t*>(v.data) + t * v.token_stride * bytes_of(rows.io.value.dtype);
    auto args = sized<kvx_append_args_t>();
    args.slot_dtype = KVX_DTYPE_S64;
    args.layer = &layer;
    args.k = &k;
    args.v = &v;
    args.slots = &slots[static_cast<size_t>(t)];
    args.num_tokens = 1;
    expect(kvx_append(&args, nullptr) == KVX_STATUS_OK, "pages take a row");
  }

  // The pages' rows in an F32 layer of the same blocks are those of a gather.
  void transcode_pages(const kvx_layer_t& pages, const std::vector<int64_t>& slots) {
    const size_t elements =
        static_cast<size_t>(shape_.num_slots()) * shape_.num_heads * shape_.head_dim;
    std::vector<float> k(elements, 7), v(elements, 7);
    auto cache = sized<kvx_cache_desc_t>();
    cache.num_blocks = shape_.num_blocks;
    cache.block_size = shape_.block_size;
    cache.num_kv_heads = shape_.num_heads;
    cache.head_dim = shape_.head_dim;
    const auto tensor = [&](std::vector<float>& data) {
      return api::tensor(data.data(), KVX_DTYPE_F32, KVX_LAYOUT_BLOCK_NHD,
                         {shape_.num_blocks, shape_.block_size, shape_.num_heads, shape_.head_dim});
    };
    cache.k = tensor(k);
    cache.v = tensor(v);
    auto plain = sized<kvx_layer_t>();
    plain.cache = &cache;
    auto args = sized<kvx_transcode_args_t>();
    args.from = &pages;
    args.to = &plain;
    args.slot_dtype = KVX_DTYPE_S64;
    args.num_tokens = std::ssize(slots);
    args.from_slots = args.to_slots = slots.data();
    expect(kvx_transcode(&args, nullptr) == KVX_STATUS_OK, "pages become floats");
    std::vector<float> gathered_k(elements), gathered_v(elements);
    gather_slots(pages, shape_, gathered_k, gathered_v);
    const size_t row = size_t{shape_.num_heads} * shape_.head_dim;
    for (const int64_t slot : slots) {
      const size_t at = static_cast<size_t>(slot) * row;
      expect(memcmp(&k[at], &gathered_k[at], row * 4) == 0 &&
                 memcmp(&v[at], &gathered_v[at], row * 4) == 0,
             "transcode and gather give the same rows");
    }
  }

  Choices choices_;
  Shape shape_{};
};

}  // namespace
}  // namespace kvx::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  FuzzedDataProvider data(bytes, size);
  kvx::fuzz::Case(data).run();
  return 0;
}
