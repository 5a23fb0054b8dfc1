// EventEncoder: the names of the fields are vLLM's.
#include "components/observe/event_encoder.hpp"

namespace kvx::observe {
namespace {

using Packer = msgpack::packer<msgpack::sbuffer>;

void pack_text_or_nil(Packer& packer, const std::string& text) {
  if (text.empty()) {
    packer.pack_nil();
  } else {
    packer.pack(text);
  }
}

bool have_equal_keys(const Event& a, const Event& b) {
  return a.adapter == b.adapter && a.image == b.image && a.tenant == b.tenant;
}

// May `next` join the event that ends with `last`?
bool is_continued_by(const Event& last, const Event& next) {
  if (next.kind != last.kind || next.kind == KVX_OBSERVE_ALL_CLEARED) return false;
  if (next.medium != last.medium) return false;
  if (next.kind == KVX_OBSERVE_REMOVED) return true;
  return next.has_parent && next.parent == last.hash && have_equal_keys(last, next);
}

// What a block's hash is made of beside its tokens, in vLLM's order.
void pack_extra_keys(Packer& packer, const Event& event) {
  const std::string* const keys[] = {&event.adapter, &event.image, &event.tenant};
  uint32_t count = 0;
  for (const std::string* key : keys) count += key->empty() ? 0 : 1;
  if (count == 0) {
    packer.pack_nil();
    return;
  }
  packer.pack_array(count);
  for (const std::string* key : keys) {
    if (!key->empty()) packer.pack(*key);
  }
}

}  // namespace

void EventEncoder::find_runs(const EventRing& ring, int64_t num_events) {
  runs_.clear();
  for (int64_t i = 0; i < num_events; ++i) {
    if (i > 0 && is_continued_by(ring.event(i - 1), ring.event(i))) {
      ++runs_.back().count;
    } else {
      runs_.push_back({i, 1});
    }
  }
}

void EventEncoder::pack_hash(Packer& packer, const Hash& hash) const {
  if (!hashes_are_integers_) {
    constexpr auto kBytes = static_cast<uint32_t>(std::tuple_size_v<Hash>);
    packer.pack_bin(kBytes);
    packer.pack_bin_body(reinterpret_cast<const char*>(hash.data()), kBytes);
    return;
  }
  uint64_t low = 0;  // of the hash as one big-endian number
  for (size_t i = hash.size() - 8; i < hash.size(); ++i) low = low << 8 | hash[i];
  packer.pack_uint64(low);
}

void EventEncoder::pack_hashes(Packer& packer, const EventRing& ring, const Run& run) const {
  packer.pack("block_hashes");
  packer.pack_array(static_cast<uint32_t>(run.count));
  for (int64_t i = 0; i < run.count; ++i) pack_hash(packer, ring.event(run.first + i).hash);
}

void EventEncoder::pack_stored(Packer& packer, const EventRing& ring, const Run& run) const {
  const Event& event = ring.event(run.first);
  packer.pack_map(9);
  packer.pack("type");
  packer.pack("BlockStored");
  pack_hashes(packer, ring, run);
  packer.pack("parent_block_hash");
  if (event.has_parent) {
    pack_hash(packer, event.parent);
  } else {
    packer.pack_nil();
  }
  packer.pack("token_ids");
  packer.pack_array(static_cast<uint32_t>(run.count * block_size_));
  for (int64_t i = 0; i < run.count; ++i) {
    for (const int32_t token : ring.tokens(run.first + i)) packer.pack_int32(token);
  }
  packer.pack("block_size");
  packer.pack_int32(block_size_);
  packer.pack("lora_id");
  packer.pack_nil();
  packer.pack("medium");
  packer.pack(event.medium);
  packer.pack("lora_name");
  pack_text_or_nil(packer, event.adapter);
  packer.pack("extra_keys");
  packer.pack_array(static_cast<uint32_t>(run.count));
  for (int64_t i = 0; i < run.count; ++i) pack_extra_keys(packer, event);
}

void EventEncoder::pack_removed(Packer& packer, const EventRing& ring, const Run& run) const {
  packer.pack_map(3);
  packer.pack("type");
  packer.pack("BlockRemoved");
  pack_hashes(packer, ring, run);
  packer.pack("medium");
  packer.pack(ring.event(run.first).medium);
}

std::string_view EventEncoder::encode(const EventRing& ring, int64_t num_events, double seconds) {
  find_runs(ring, num_events);
  buffer_.clear();
  Packer packer(buffer_);
  packer.pack_array(3);
  packer.pack_double(seconds);
  packer.pack_array(static_cast<uint32_t>(runs_.size()));
  for (const Run& run : runs_) {
    switch (ring.event(run.first).kind) {
      case KVX_OBSERVE_STORED:
        pack_stored(packer, ring, run);
        break;
      case KVX_OBSERVE_REMOVED:
        pack_removed(packer, ring, run);
        break;
      default:
        packer.pack_map(1);
        packer.pack("type");
        packer.pack("AllBlocksCleared");
    }
  }
  packer.pack_int32(data_parallel_rank_);
  return {buffer_.data(), buffer_.size()};
}

}  // namespace kvx::observe
