// A write with all its memory.
#include "tools/conformance/write_call.hpp"

#include <cstring>

#include "tools/conformance/numbers.hpp"

namespace kvx::conformance {
namespace {

uint64_t place_of(int side, int64_t token, int64_t head, int64_t dim) {
  return static_cast<uint64_t>(((side * 1000 + token) * 1000 + head) * 1000 + dim);
}

// Slots that cross block borders and go backwards, the last and the first slot, and skipped tokens
// in between.
std::vector<int64_t> jumbled_slots(const Geometry& g) {
  const int64_t n = g.num_slots();
  std::vector<int64_t> slots = {n - 1, -1};
  for (int64_t slot = 1; slot < n - 1 && slot < g.block_size + 2; ++slot) slots.push_back(slot);
  slots.push_back(0);
  for (int64_t slot = n - 2; slot > n / 2 && slot >= g.block_size + 2; --slot) {
    slots.push_back(slot);
  }
  if (slots.size() % 2 != 0) slots.push_back(-7);  // so that padded IO has two sequences
  return slots;
}

}  // namespace

int ScaleCase::exponent(int side, int64_t block, int64_t head) const {
  if (granularity == KVX_SCALE_NONE) return 0;
  const bool has_block =
      granularity == KVX_SCALE_PER_BLOCK || granularity == KVX_SCALE_PER_BLOCK_HEAD;
  const bool has_head =
      granularity == KVX_SCALE_PER_HEAD || granularity == KVX_SCALE_PER_BLOCK_HEAD;
  const int64_t place = (has_block ? block * 3 : 0) + (has_head ? head * 2 : 0) + side * 4;
  constexpr int kExponents[] = {2, -3, 1, 3, -2, -1, 0};
  return kExponents[place % 7];
}

WriteCall::WriteCall(const WriteCase& write_case) : given(write_case) {
  if (given.slots.empty()) given.slots = jumbled_slots(given.geometry);
  cache = make_cache(memory, given.geometry, given.arrangement, given.k_cache, given.v_cache);
  write.size = sizeof write;
  const auto num_tokens = static_cast<int64_t>(given.slots.size());
  write.io = make_io(memory, given.geometry, given.k_io, given.v_io, num_tokens,
                     given.num_sequences, given.gap);
  write.slots.size = sizeof write.slots;
  write.slots.dtype = given.slot_dtype;
  write.slots.token_count = static_cast<uint32_t>(num_tokens);
  write.slots.invalid_slot = given.invalid_slot;
  write.slots.slots = add_indices(memory, "slots.slots", given.slots, given.slot_dtype);
  write.k_scale_desc.size = sizeof write.k_scale_desc;
  write.v_scale_desc.size = sizeof write.v_scale_desc;
  write.k_scale = add_scales(0, write.k_scale_desc);
  write.v_scale = add_scales(1, write.v_scale_desc);
  fill_io();
}

// Fills the descriptor, or leaves it empty and returns the address of the tensor's scale.
const void* WriteCall::add_scales(int side, kvx_scale_desc_t& desc) {
  const ScaleCase& scale = given.scale;
  if (scale.granularity == KVX_SCALE_NONE) return nullptr;
  const bool has_block =
      scale.granularity == KVX_SCALE_PER_BLOCK || scale.granularity == KVX_SCALE_PER_BLOCK_HEAD;
  const bool has_head =
      scale.granularity == KVX_SCALE_PER_HEAD || scale.granularity == KVX_SCALE_PER_BLOCK_HEAD;
  const int64_t blocks = has_block ? given.geometry.num_blocks : 1;
  const int64_t heads = has_head ? given.geometry.num_heads : 1;
  const int64_t head_step = 1 + scale.gap;
  const int64_t block_step = heads * head_step + scale.gap;
  const int64_t bytes = bytes_of(scale.dtype);
  uint8_t* data =
      memory.add(side == 0 ? "k scales" : "v scales", blocks * block_step * bytes).data();
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const uint32_t bits = bits_of(scale.dtype, {.exponent = scale.exponent(side, b, h)});
      memcpy(data + (b * block_step + h * head_step) * bytes, &bits, static_cast<size_t>(bytes));
    }
  }
  if (scale.by_pointer) return data;
  desc.dtype = scale.dtype;
  desc.granularity = scale.granularity;
  desc.data = data;
  const auto add_axis = [&desc](int64_t extent, int64_t stride) {
    desc.shape[desc.ndim] = extent;
    desc.stride[desc.ndim++] = stride;
  };
  if (has_block) add_axis(blocks, block_step);
  if (has_head) add_axis(heads, head_step);
  if (desc.ndim == 0) add_axis(1, 1);
  return nullptr;
}

// Equal types are copied as bits, so the buffer's noise is a valid input.
void WriteCall::fill_io() {
  for (int side = 0; side < 2; ++side) {
    const kvx_tensor_desc_t& io = io_tensor(side);
    if (io.dtype == cache_tensor(side).dtype) continue;
    for (int64_t t = 0; t < write.io.num_tokens; ++t) {
      const int64_t block = given.slots[static_cast<size_t>(t)] / given.geometry.block_size;
      for (int64_t h = 0; h < given.geometry.num_heads; ++h) {
        for (int64_t d = 0; d < given.geometry.head_dim; ++d) {
          Number number = some_number(place_of(side, t, h, d));
          if (block >= 0) number.exponent += given.scale.exponent(side, block, h);
          const uint32_t bits = bits_of(io.dtype, number);
          memcpy(io_element(io, t, h, d), &bits, static_cast<size_t>(bytes_of(io.dtype)));
        }
      }
    }
  }
}

void WriteCall::expect_moved() {
  const Geometry& g = given.geometry;
  for (int side = 0; side < 2; ++side) {
    const kvx_tensor_desc_t& io = io_tensor(side);
    const kvx_tensor_desc_t& target = cache_tensor(side);
    const int64_t bytes = bytes_of(target.dtype);
    for (int64_t t = 0; t < write.io.num_tokens; ++t) {
      const int64_t slot = given.slots[static_cast<size_t>(t)];
      if (slot < 0 || slot == given.invalid_slot) continue;
      for (int64_t h = 0; h < g.num_heads; ++h) {
        for (int64_t d = 0; d < g.head_dim; ++d) {
          uint32_t bits = bits_of(target.dtype, some_number(place_of(side, t, h, d)));
          if (io.dtype == target.dtype) {
            memcpy(&bits, io_element(io, t, h, d), static_cast<size_t>(bytes));
          }
          const int64_t place =
              place_in_cache(target, slot / g.block_size, slot % g.block_size, h, d);
          memcpy(memory.expect(static_cast<uint8_t*>(target.data) + place * bytes), &bits,
                 static_cast<size_t>(bytes));
        }
      }
    }
  }
}

void WriteCall::must_move(WriteFunction function) {
  memory.take_picture();
  expect_moved();
  require_status(function(&cache, &write, nullptr), KVX_STATUS_OK, "the write");
  require_picture(memory, cache, write.io, "after the write");
}

void WriteCall::must_refuse(WriteFunction function, kvx_status_t expected,
                            const std::string& what) {
  memory.take_picture();
  require_status(function(&cache, &write, nullptr), expected, what);
  require_picture(memory, cache, write.io, what);
}

}  // namespace kvx::conformance
