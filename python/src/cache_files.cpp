// Cache files seen from outside: what one holds, and whether its blocks are as they were written.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/src/bindings.hpp"
#include "python/src/errors.hpp"
#include "python/src/interrupt.hpp"
#include "tier/file_summary.hpp"

namespace kvx::python {
namespace {

namespace nb = nanobind;

// The tokens of a sequence, from its first block to its last.
std::vector<int32_t> tokens_of(const tier::FileIndex& index, int32_t last_block) {
  std::vector<int32_t> chain;
  for (int32_t block = last_block; block >= 0; block = index.blocks[block].parent) {
    chain.push_back(block);
  }
  std::vector<int32_t> tokens;
  for (auto block = chain.rbegin(); block != chain.rend(); ++block) {
    const std::vector<int32_t>& more = index.blocks[*block].tokens;
    tokens.insert(tokens.end(), more.begin(), more.end());
  }
  return tokens;
}

nb::list kinds_of(const tier::FileIndex& index) {
  const std::vector<tier::KindSummary> summaries = tier::summarize_kinds(index);
  nb::list kinds;
  for (size_t i = 0; i < summaries.size(); ++i) {
    nb::dict kind;
    kind["layer_group"] = index.kinds[i].group;
    kind["is_full_precision"] = index.kinds[i].is_full_precision;
    kind["block_copies"] = summaries[i].num_block_copies;
    kind["bytes"] = summaries[i].memory_bytes;
    kind["stored_bytes"] = summaries[i].stored_bytes;
    kinds.append(kind);
  }
  return kinds;
}

tier::CacheFileReader opened(const std::string& path) {
  nb::gil_scoped_release no_gil;
  return value_of(tier::CacheFileReader::open(path));
}

nb::dict inspect_file(const nb::bytes& path) {
  const tier::CacheFileReader file = opened(path.c_str());
  const tier::FileIndex& index = file.index();
  nb::dict dict;
  dict["version"] = tier::kFileVersion;
  dict["file_bytes"] = file.file_bytes();
  dict["fingerprint"] = index.fingerprint;
  dict["block_size"] = index.block_size;
  dict["blocks"] = index.blocks.size();
  nb::list sequences;
  for (const int32_t last : index.sequences) sequences.append(nb::cast(tokens_of(index, last)));
  dict["sequences"] = sequences;
  dict["kinds"] = kinds_of(index);
  return dict;
}

void check_file(const nb::bytes& path_bytes) {
  const std::string path = path_bytes.c_str();
  nb::gil_scoped_release no_gil;
  auto file = value_of(tier::CacheFileReader::open(path));
  interruptibly([&] { throw_if_error(tier::check_block_copies(file, path)); });
}

}  // namespace

void bind_cache_files(nb::module_& module) {
  module.def("inspect_file", &inspect_file, nb::arg("path"));
  module.def("check_file", &check_file, nb::arg("path"));
}

}  // namespace kvx::python
