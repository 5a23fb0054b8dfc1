// BlockFiles: an engine's blocks in cache files (docs/cache-file.md), a block a file. The engine
// names a block by a hash of all tokens up to its end; the file holds that name, the block's own
// tokens and a page of every layer, each with its checksum.
//
//   scope  image = the block's name     kinds  one a layer     blocks  [the one, its parent the
//   scope]
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/os/os.hpp"
#include "kv/files/fingerprint.hpp"
#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/errors.hpp"
#include "tier/cache_file.hpp"
#include "tier/file_summary.hpp"
#include "tier/layers/layer_file.hpp"
#include "tier/whole_file.hpp"
#include "tier/whole_transfer.hpp"

namespace kvx::python {
namespace {

using Tokens = std::vector<int32_t>;

std::span<uint8_t> bytes_of(const nb::ndarray<>& page) {
  return {static_cast<uint8_t*>(page.data()), page.size()};
}

// A file that is there, and where its pages lie.
class LayerFile {
 public:
  LayerFile(std::string path, const tier::LayerHead& head)
      : path_(std::move(path)), places_(head.index.blocks[0].block_copies) {}
  const std::string& path() const { return path_; }
  const tier::StoredBlockCopy* place(int layer, int64_t bytes) const {
    const bool is_page =
        layer >= 0 && layer < std::ssize(places_) && places_[layer].stored_bytes == bytes;
    return is_page ? &places_[layer] : nullptr;
  }

 private:
  std::string path_;
  std::vector<tier::StoredBlockCopy> places_;  // by layer
};

// A layer's pages of several files, uint8 [files, ...]. Returns what went wrong, file by file; ""
// for those that were written.
std::vector<std::string> write_layer(const std::vector<const LayerFile*>& files, int layer,
                                     nb::object pages) {
  const PageMemory memory = page_memory(pages, "pages", 1);
  const auto num_pages = static_cast<int64_t>(memory.array.shape(0));
  if (num_pages != std::ssize(files)) {
    throw CoreError(invalid_argument("pages has {} pages and files {}; expected as many", num_pages,
                                     files.size()));
  }
  int64_t page_bytes = 1;
  for (size_t i = 1; i < memory.array.ndim(); ++i) {
    page_bytes *= static_cast<int64_t>(memory.array.shape(i));
  }
  for (const LayerFile* file : files) {
    if (file->place(layer, page_bytes) != nullptr) continue;
    throw CoreError(invalid_argument("'{}' has no page of {} bytes of layer {}", file->path(),
                                     page_bytes, layer));
  }
  const nb::gil_scoped_release no_gil;
  std::vector<std::string> problems;
  const auto* page = static_cast<const uint8_t*>(memory.array.data());
  for (const LayerFile* file : files) {
    const Status written = tier::write_record(file->path(), *file->place(layer, page_bytes),
                                              {page, static_cast<size_t>(page_bytes)});
    problems.push_back(written.ok() ? "" : written.error().message);
    page += memory.page_stride;
  }
  return problems;
}

// A block's file that was checked: where its pages lie. It is opened anew for each layer, since a
// long prefix has more blocks than a process may have open files.
class BlockPages {
 public:
  BlockPages(std::string path, const tier::FileIndex& index)
      : path_(std::move(path)), copies_(index.blocks[0].block_copies) {
    for (const tier::StoredBlockCopy& copy : copies_) {
      bytes_.push_back(index.kinds[copy.kind].bytes);
    }
  }
  int num_layers() const { return static_cast<int>(copies_.size()); }
  // Requires: a layer of it.
  Status read(int layer, std::span<uint8_t> page) const {
    if (std::ssize(page) != bytes_[layer]) {
      return invalid_argument("'{}': layer {} has pages of {} bytes; expected {}", path_, layer,
                              bytes_[layer], page.size());
    }
    const tier::StoredBlockCopy& copy = copies_[layer];
    std::vector<uint8_t> stored(static_cast<size_t>(copy.stored_bytes));
    const int descriptor = os::open_file(path_, os::Open::kRead);
    if (descriptor < 0) return tier::file_error(path_, "cannot be read");
    const bool is_read = tier::transfer_all(stored.size(), [&](size_t done) {
      return os::read_at(descriptor, std::span(stored).subspan(done),
                         copy.offset + static_cast<int64_t>(done));
    });
    os::close_file(descriptor);
    if (!is_read) return invalid_argument("'{}' is cut short", path_);
    const Status decoded = tier::decode_block_copy(copy, stored, page);
    if (decoded.ok()) return {};
    return Error{decoded.error().code,
                 fmt::format("'{}': layer {}: {}", path_, layer, decoded.error().message)};
  }

 private:
  std::string path_;
  std::vector<tier::StoredBlockCopy> copies_;  // by layer
  std::vector<int64_t> bytes_;                 // of a page
};

// Reads a layer of several blocks into pages, uint8 [pages, ...], the i-th block to page ids[i].
// Returns what went wrong, block by block; "" for those that were read.
std::vector<std::string> read_layer(const std::vector<const BlockPages*>& blocks, int layer,
                                    nb::object pages, const std::vector<int64_t>& ids) {
  const PageMemory memory = page_memory(pages, "pages", 1);
  const auto num_pages = static_cast<int64_t>(memory.array.shape(0));
  if (ids.size() != blocks.size()) {
    throw CoreError(invalid_argument("ids has {} entries; expected {}, as many as blocks",
                                     ids.size(), blocks.size()));
  }
  int64_t page_bytes = 1;
  for (size_t i = 1; i < memory.array.ndim(); ++i) {
    page_bytes *= static_cast<int64_t>(memory.array.shape(i));
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= num_pages) {
      throw CoreError(
          invalid_argument("ids[{}] is {}; expected 0 to {}", i, ids[i], num_pages - 1));
    }
    if (layer < 0 || layer >= blocks[i]->num_layers()) {
      throw CoreError(invalid_argument("layer is {}; blocks[{}] has {} layers", layer, i,
                                       blocks[i]->num_layers()));
    }
  }
  const nb::gil_scoped_release no_gil;
  std::vector<std::string> problems;
  auto* const first = static_cast<uint8_t*>(memory.array.data());
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::span page(first + ids[i] * memory.page_stride, static_cast<size_t>(page_bytes));
    const Status read = blocks[i]->read(layer, page);
    problems.push_back(read.ok() ? "" : read.error().message);
  }
  return problems;
}

class BlockFiles {
 public:
  // fingerprint: all that decides a page's bytes beside its tokens, a fact a line. tokens: a
  // block's.
  BlockFiles(std::string fingerprint, int block_size)
      : fingerprint_(std::move(fingerprint)), block_size_(block_size) {}

  // pages: each layer's page, uint8 [1, ...]. Returns the file's bytes.
  int64_t save(const std::string& path, const std::string& name, const Tokens& tokens,
               const std::vector<nb::object>& pages, int zstd_level) const {
    const std::vector<nb::ndarray<>> arrays = arrays_of(pages);
    nb::gil_scoped_release no_gil;
    tier::FileIndex index = index_of(name, tokens);
    auto file = value_of(tier::CacheFileWriter::create(path, zstd_level));
    for (const nb::ndarray<>& page : arrays) {
      const auto layer = static_cast<int32_t>(index.kinds.size());
      const std::span<uint8_t> bytes = bytes_of(page);
      index.kinds.push_back({layer, false, static_cast<int64_t>(bytes.size())});
      index.blocks[0].block_copies.push_back(value_of(file.add_block_copy(layer, bytes)));
    }
    throw_if_error(file.finish(index));
    return file.bytes_written();
  }

  // Makes the file without its pages, of which each layer's has so many bytes.
  LayerFile begin(const std::string& path, const std::string& name, const Tokens& tokens,
                  const std::vector<int64_t>& page_bytes) const {
    const nb::gil_scoped_release no_gil;
    tier::FileIndex index = index_of(name, tokens);
    for (const int64_t bytes : page_bytes) {
      const auto layer = static_cast<int32_t>(index.kinds.size());
      if (bytes < 1) {
        throw CoreError(
            invalid_argument("page_bytes[{}] is {}; expected at least 1", layer, bytes));
      }
      index.kinds.push_back({layer, false, bytes});
      index.blocks[0].block_copies.push_back({layer, tier::Codec::kRaw, 0, 0, {}});
    }
    const tier::LayerHead head = tier::lay_out_layers(std::move(index));
    throw_if_error(tier::create_layer_file(path, head));
    return {path, head};
  }

  // Throws what is wrong with the file, or how it is another block; all of it is read.
  void check(const std::string& path, const std::string& name, const Tokens& tokens) const {
    nb::gil_scoped_release no_gil;
    auto file = opened(path, name, tokens);
    throw_if_error(tier::check_block_copies(file, path));
  }

  // The block, for read_layer(). Throws as check(), but for damaged pages.
  BlockPages open_block(const std::string& path, const std::string& name,
                        const Tokens& tokens) const {
    const nb::gil_scoped_release no_gil;
    const auto file = opened(path, name, tokens);
    return {path, file.index()};
  }

 private:
  static std::vector<nb::ndarray<>> arrays_of(const std::vector<nb::object>& pages) {
    std::vector<nb::ndarray<>> arrays;
    for (const nb::object& page : pages) {
      arrays.push_back(page_memory(page, "pages", 1).array);
    }
    return arrays;
  }
  tier::FileIndex index_of(const std::string& name, const Tokens& tokens) const {
    if (static_cast<int64_t>(tokens.size()) != block_size_) {
      throw CoreError(
          invalid_argument("tokens has {} numbers; expected {}", tokens.size(), block_size_));
    }
    tier::FileIndex index;
    index.fingerprint = fingerprint_;
    index.block_size = block_size_;
    index.scopes = {{"", name, ""}};
    index.blocks = {{-1, tokens, {}}};
    return index;
  }

  tier::CacheFileReader opened(const std::string& path, const std::string& name,
                               const Tokens& tokens) const {
    const tier::FileIndex expected = index_of(name, tokens);
    auto file = value_of(tier::CacheFileReader::open(path));
    const tier::FileIndex& found = file.index();
    const std::string reason = kv::reason_not_to_load(found.fingerprint, fingerprint_);
    if (!reason.empty()) {
      throw CoreError({ErrorCode::kIncompatible, fmt::format("'{}': {}", path, reason)});
    }
    const bool is_block = found.block_size == block_size_ && found.scopes == expected.scopes &&
                          found.blocks.size() == 1 && found.blocks[0].parent == -1 &&
                          found.blocks[0].tokens == tokens;
    if (!is_block) {
      throw CoreError({ErrorCode::kIncompatible, fmt::format("'{}': it is another block", path)});
    }
    return file;
  }

  const std::string fingerprint_;
  const int block_size_;
};

}  // namespace

void bind_block_files(nb::module_& module) {
  nb::class_<LayerFile>(module, "LayerFile").def_prop_ro("path", &LayerFile::path);
  module.def("write_layer", &write_layer, nb::arg("files"), nb::arg("layer"), nb::arg("pages"));
  nb::class_<BlockPages>(module, "BlockPages");
  module.def("read_layer", &read_layer, nb::arg("blocks"), nb::arg("layer"), nb::arg("pages"),
             nb::arg("ids"));
  nb::class_<BlockFiles>(module, "BlockFiles")
      .def(nb::init<std::string, int>(), nb::arg("fingerprint"), nb::arg("block_size"))
      .def("save", &BlockFiles::save, nb::arg("path"), nb::arg("name"), nb::arg("tokens"),
           nb::arg("pages"), nb::arg("zstd_level"))
      .def("begin", &BlockFiles::begin, nb::arg("path"), nb::arg("name"), nb::arg("tokens"),
           nb::arg("page_bytes"))
      .def("check", &BlockFiles::check, nb::arg("path"), nb::arg("name"), nb::arg("tokens"))
      .def("open", &BlockFiles::open_block, nb::arg("path"), nb::arg("name"), nb::arg("tokens"));
}

}  // namespace kvx::python
