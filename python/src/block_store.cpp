// BlockStore: an engine's blocks in a store that engines share (docs/store-record.md). The engine
// names a block by a hash of all tokens up to its end, of at most 32 bytes, which the record holds
// where a cache of kvx's own has the hashes of its chain; it holds no tokens.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "python/src/bindings.hpp"
#include "python/src/context.hpp"
#include "python/src/errors.hpp"
#include "tier/store/block_name.hpp"
#include "tier/store/bounded_store.hpp"
#include "tier/store/open_store.hpp"

namespace kvx::python {

namespace nb = nanobind;

namespace {

constexpr size_t kMostNameBytes = 32;

class BlockStore {
 public:
  // The index-th tier that the text names, a store. fingerprint: all that decides a page's bytes
  // beside its tokens. max_bytes: of a block in one layer group.
  BlockStore(const std::string& tiers, size_t index, const std::string& fingerprint,
             int64_t max_bytes)
      : scope_(tier::store_scope_of(cache::HashAlgorithm::kSha256, fingerprint, {})) {
    const std::vector<tier::TierConfig> configs = value_of(tier::parse_tiers(tiers));
    if (index >= configs.size() || !tier::is_store(configs[index].kind)) {
      throw CoreError(invalid_argument("tier {} of '{}' is no store", index, tiers));
    }
    const tier::TierConfig& config = configs[index];
    key_ = value_of(tier::record_key_of(config));
    timeout_ms_ = config.timeout_ms;
    // A folder may lie on a network, whose file system waits as long as it likes.
    store_ = std::make_unique<tier::BoundedStore>(
        value_of(tier::open_store(config, tier::record_bytes(0, max_bytes))),
        std::chrono::milliseconds(timeout_ms_));
  }

  int64_t timeout_ms() const { return timeout_ms_; }

  // names: each block's bytes; groups: their layer groups. Throws where the store cannot be
  // reached.
  std::vector<bool> exists(const std::vector<nb::bytes>& names,
                           const std::vector<int>& groups) const {
    const std::vector<tier::BlockName> blocks = blocks_of(names, groups);
    const nb::gil_scoped_release no_gil;
    const std::vector<std::string> keys = keys_of(blocks);
    std::vector<uint8_t> has(keys.size());
    if (!keys.empty()) throw_if_error(store_->exists(keys, has));
    return {has.begin(), has.end()};
  }

  // payloads: the blocks' bytes. Whether each was stored.
  std::vector<bool> put(const std::vector<nb::bytes>& names, const std::vector<int>& groups,
                        const std::vector<nb::bytes>& payloads) const {
    const std::vector<tier::BlockName> blocks = blocks_of(names, groups);
    check_count("payloads", payloads.size(), names.size());
    std::vector<std::span<const uint8_t>> from;
    for (const nb::bytes& payload : payloads) {
      from.emplace_back(static_cast<const uint8_t*>(payload.data()), payload.size());
    }
    const nb::gil_scoped_release no_gil;
    std::vector<std::vector<uint8_t>> records(blocks.size());
    std::vector<tier::StorePut> items(blocks.size());
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto bytes = std::ssize(from[i]);
      records[i].resize(static_cast<size_t>(tier::record_bytes(0, bytes)));
      std::ranges::copy(from[i], records[i].begin() + tier::record_payload_offset(0));
      throw_if_error(tier::seal_record(facts_of(blocks[i], bytes), key(), records[i]));
      items[i] = {blocks[i].key(), records[i], false};
    }
    if (!items.empty()) throw_if_error(store_->put(items));
    std::vector<bool> stored;
    for (const tier::StorePut& item : items) stored.push_back(item.is_stored);
    return stored;
  }

  // num_bytes: of each block. For each: its bytes; None: the store has none; a text: what is wrong
  // with the record that it has.
  nb::list get(const std::vector<nb::bytes>& names, const std::vector<int>& groups,
               const std::vector<int64_t>& num_bytes) const {
    const std::vector<tier::BlockName> blocks = blocks_of(names, groups);
    check_count("num_bytes", num_bytes.size(), names.size());
    std::vector<std::vector<uint8_t>> records(blocks.size());
    std::vector<std::span<const uint8_t>> payloads(blocks.size());
    std::vector<std::string> problems(blocks.size());
    std::vector<tier::StoreGet> items(blocks.size());
    {
      const nb::gil_scoped_release no_gil;
      for (size_t i = 0; i < blocks.size(); ++i) {
        records[i].resize(static_cast<size_t>(tier::record_bytes(0, num_bytes[i])));
        items[i] = {blocks[i].key(), records[i], -1};
      }
      if (!items.empty()) throw_if_error(store_->get(items));
      for (size_t i = 0; i < blocks.size(); ++i) {
        if (items[i].num_bytes < 0) continue;
        const auto record = std::span(records[i])
                                .first(std::min<size_t>(records[i].size(),
                                                        static_cast<size_t>(items[i].num_bytes)));
        const auto opened = tier::open_record(facts_of(blocks[i], num_bytes[i]), key(), record);
        if (opened.ok()) {
          payloads[i] = opened.value();
        } else {
          problems[i] = opened.error().message;
        }
      }
    }
    nb::list found;
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (!problems[i].empty()) {
        found.append(nb::str(problems[i].c_str()));
      } else if (payloads[i].empty()) {
        found.append(nb::none());
      } else {
        found.append(nb::bytes(payloads[i].data(), payloads[i].size()));
      }
    }
    return found;
  }

 private:
  static void check_count(const char* name, size_t count, size_t expected) {
    if (count == expected) return;
    throw CoreError(invalid_argument("{} has {} entries; expected {}, as many as names", name,
                                     count, expected));
  }

  std::vector<tier::BlockName> blocks_of(const std::vector<nb::bytes>& names,
                                         const std::vector<int>& groups) const {
    home_.check();
    check_count("groups", groups.size(), names.size());
    std::vector<tier::BlockName> blocks;
    for (size_t i = 0; i < names.size(); ++i) {
      if (names[i].size() == 0 || names[i].size() > kMostNameBytes) {
        throw CoreError(invalid_argument("a block's name has {} bytes; expected 1 to {}",
                                         names[i].size(), kMostNameBytes));
      }
      std::array<uint8_t, kMostNameBytes> name{};
      std::copy_n(static_cast<const uint8_t*>(names[i].data()), names[i].size(), name.begin());
      tier::BlockName& block = blocks.emplace_back();
      block.scope = scope_;
      std::copy_n(name.begin(), block.hash.bytes.size(), block.hash.bytes.begin());
      std::copy_n(name.begin() + block.hash.bytes.size(), block.parent.bytes.size(),
                  block.parent.bytes.begin());
      block.group = groups[i];
    }
    return blocks;
  }

  static std::vector<std::string> keys_of(const std::vector<tier::BlockName>& blocks) {
    std::vector<std::string> keys;
    for (const tier::BlockName& block : blocks) keys.push_back(block.key());
    return keys;
  }

  static tier::RecordFacts facts_of(const tier::BlockName& block, int64_t payload_bytes) {
    tier::RecordFacts facts;
    facts.scope = block.scope.hash;
    facts.parent = block.parent;
    facts.hash = block.hash;
    facts.group = block.group;
    facts.payload_bytes = payload_bytes;
    return facts;
  }

  const tier::RecordKey* key() const { return key_ ? &*key_ : nullptr; }

  const tier::StoreScope scope_;
  std::optional<tier::RecordKey> key_;
  int64_t timeout_ms_ = 0;
  std::unique_ptr<tier::RemoteStore> store_;
  const HomeProcess home_;
};

}  // namespace

void bind_block_store(nb::module_& module) {
  nb::class_<BlockStore>(module, "BlockStore")
      .def(nb::init<const std::string&, size_t, const std::string&, int64_t>(), nb::arg("tiers"),
           nb::arg("index"), nb::arg("fingerprint"), nb::arg("max_bytes"))
      .def_prop_ro("timeout_ms", &BlockStore::timeout_ms)
      .def("exists", &BlockStore::exists, nb::arg("names"), nb::arg("groups"))
      .def("put", &BlockStore::put, nb::arg("names"), nb::arg("groups"), nb::arg("payloads"))
      .def("get", &BlockStore::get, nb::arg("names"), nb::arg("groups"), nb::arg("num_bytes"));
}

}  // namespace kvx::python
