// HostBlocks: copies of an engine's blocks in host memory, or in files of a folder, made and read
// back by the host tier's queue. The engine decides which block lies in which slot. A checksum a
// page detects a block that comes back changed. A GPU's pages are copied to and from pinned memory.
//
//   slot  [page of the group's first layer][of its second] ...     a checksum a page
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <unordered_map>

#include "cache/pool/memory.hpp"
#include "core/checked.hpp"
#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/context.hpp"
#include "python/src/cuda_stream.hpp"
#include "python/src/errors.hpp"
#include "tier/file_memory.hpp"
#include "tier/transfer_queue.hpp"

namespace kvx::python {
namespace {

using tier::Direction;

struct Layer {
  PageMemory pages;
  int64_t page_bytes = 0;
  int64_t offset = 0;  // in a slot
};

class HostBlocks {
 public:
  // groups: for each group of layers, each layer's pages, uint8 [pages, bytes], all in one place.
  // stream: for a GPU's pages, what copies are ordered behind: those that are started see all that
  // the stream was given before. None is the default stream. folder: slots lie in its files; empty:
  // in memory.
  HostBlocks(const std::vector<std::vector<nb::object>>& groups, int64_t num_slots,
             nb::object stream, const nb::bytes& folder)
      : stream_(std::move(stream)), num_slots_(num_slots) {
    const ArrayPlace place = place_of(groups);
    int64_t largest_page = 0;
    for (const std::vector<nb::object>& layers : groups) {
      int64_t offset = 0;
      std::vector<Layer>& group = groups_.emplace_back();
      for (const nb::object& object : layers) {
        PageMemory pages = page_memory(object, "pages", 1, place);
        int64_t bytes = 1;
        for (size_t i = 1; i < pages.array.ndim(); ++i) {
          bytes *= static_cast<int64_t>(pages.array.shape(i));
        }
        group.push_back({std::move(pages), bytes, offset});
        offset += bytes;
        largest_page = std::max(largest_page, bytes);
      }
      slot_bytes_ = std::max(slot_bytes_, offset);
      most_layers_ = std::max(most_layers_, group.size());
    }
    if (num_slots < 1 || slot_bytes_ < 1) {
      throw CoreError(
          invalid_argument("num_slots is {} and a slot has {} bytes; expected at least "
                           "1 of each",
                           num_slots, slot_bytes_));
    }
    const auto bytes = (CheckedSize(num_slots) * slot_bytes_).get();
    if (!bytes) throw CoreError(out_of_range("num_slots is {}; that is too many", num_slots));
    tier::TierLink link = link_to(place);
    if (folder.size() > 0) {
      link = value_of(tier::file_link(folder.c_str(), std::move(link), largest_page));
      own_memory_ = std::move(link.own_memory);
      files_ = link.files;
    }
    memory_ = value_of(link.memory->allocate(*bytes, "blocks in host memory"));
    checksums_.resize(static_cast<size_t>(num_slots) * most_layers_);
    queue_ = std::make_unique<tier::TransferQueue>(std::move(link.copier));
  }
  ~HostBlocks() {
    if (!home_.is_this()) static_cast<void>(queue_.release());
  }

  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t group_bytes(int group) const {
    check_slot(group, 0);
    return bytes_of_group(groups_[group]);
  }

  // One job's copies, page to slot; block_ids and slots have as many numbers.
  void store(int64_t job, int group, const std::vector<int64_t>& block_ids,
             const std::vector<int64_t>& slots) {
    push(Direction::kStore, job, group, block_ids, slots);
  }
  void load(int64_t job, int group, const std::vector<int64_t>& block_ids,
            const std::vector<int64_t>& slots) {
    push(Direction::kLoad, job, group, block_ids, slots);
  }

  // A layer of a load that a step waits for layer by layer, under a number of its own: it ends with
  // end_layer(), not among those of drain_finished().
  void load_layer(int64_t job, int group, int layer, const std::vector<int64_t>& block_ids,
                  const std::vector<int64_t>& slots) {
    check(group, block_ids, slots);
    const auto num_layers = std::ssize(groups_[group]);
    if (layer < 0 || layer >= num_layers) {
      throw CoreError(out_of_range("layer is {}; expected 0 to {}", layer, num_layers - 1));
    }
    if (jobs_.contains(job)) throw CoreError(invalid_argument("job {} has not ended", job));
    jobs_[job].waited_for = std::make_shared<tier::TransferGroup>();
    for (size_t i = 0; i < slots.size(); ++i) {
      push_page(Direction::kLoad, job, groups_[group], static_cast<size_t>(layer), block_ids[i],
                slots[i]);
    }
  }
  // Waits for a layer: (all its pages are as they were stored, bytes).
  nb::tuple end_layer(int64_t job) {
    home_.check();
    const auto found = jobs_.find(job);
    if (found == jobs_.end() || !found->second.waited_for) {
      throw CoreError(invalid_argument("job {} is no layer that is loaded", job));
    }
    {
      const nb::gil_scoped_release no_gil;
      queue_->wait(*found->second.waited_for);
    }
    collect();
    const Job ended = found->second;
    jobs_.erase(found);
    return nb::make_tuple(ended.is_whole, ended.bytes);
  }

  // Jobs that have ended since the last call: (job, all pages are as they were stored, bytes).
  nb::list drain_finished() {
    collect();
    nb::list ended;
    std::erase_if(jobs_, [&ended](const auto& entry) {
      const auto& [number, job] = entry;
      if (job.num_open > 0 || job.waited_for) return false;
      ended.append(nb::make_tuple(number, job.is_whole, job.bytes));
      return true;
    });
    return ended;
  }

  void wait_for_all() {
    home_.check();
    nb::gil_scoped_release no_gil;
    queue_->wait_for_all();
  }

  // Whole slots of another tier into this one's, with the checksums that their pages had when they
  // were stored there: what has changed since is detected when it is loaded, and so is a slot that
  // a disk refused. How many were moved. From any thread; the caller sees to it that nothing else
  // uses these slots.
  int64_t take(const HostBlocks& from, const std::vector<int64_t>& from_slots,
               const std::vector<int64_t>& slots) {
    home_.check();
    if (slot_bytes_ != from.slot_bytes_ || most_layers_ != from.most_layers_) {
      throw CoreError(
          invalid_argument("source has slots of {} bytes; expected {}, of the same pages",
                           from.slot_bytes_, slot_bytes_));
    }
    check_slots(slots, from_slots, "from_slots");
    from.check_slots(from_slots, slots, "slots of the target");
    nb::gil_scoped_release no_gil;
    const auto layers = static_cast<int64_t>(most_layers_);
    std::vector<uint8_t> bytes(static_cast<size_t>(slot_bytes_));
    int64_t num_moved = 0;
    for (size_t i = 0; i < slots.size(); ++i) {
      std::copy_n(from.checksums_.begin() + from_slots[i] * layers, layers,
                  checksums_.begin() + slots[i] * layers);
      if (from.read(from_slots[i], bytes).ok() && write(slots[i], bytes).ok()) ++num_moved;
    }
    return num_moved;
  }

  // A slot's bytes, of a group's pages, for a store; None: they have changed since they came, or
  // a disk refuses them. From any thread, as take().
  nb::object read_slot(int group, int64_t slot) const {
    check_slot(group, slot);
    nb::object bytes = nb::steal(PyBytes_FromStringAndSize(
        nullptr, static_cast<Py_ssize_t>(bytes_of_group(groups_[group]))));
    const std::span<uint8_t> to(reinterpret_cast<uint8_t*>(PyBytes_AsString(bytes.ptr())),
                                static_cast<size_t>(bytes_of_group(groups_[group])));
    bool is_whole = false;
    {
      const nb::gil_scoped_release no_gil;
      is_whole = read(slot, to).ok();
      for (size_t l = 0; l < groups_[group].size() && is_whole; ++l) {
        const Layer& layer = groups_[group][l];
        is_whole = cache::checksum(page_of(to, layer)) == checksums_[checksum_at(slot, l)];
      }
    }
    return is_whole ? bytes : nb::none();
  }

  // Bytes of a store into a slot, which are what is loaded from it; false: a disk refuses them.
  bool write_slot(int group, int64_t slot, const nb::bytes& bytes) {
    check_slot(group, slot);
    const std::span<const uint8_t> from(static_cast<const uint8_t*>(bytes.data()), bytes.size());
    const std::vector<Layer>& layers = groups_[group];
    if (std::ssize(from) != bytes_of_group(layers)) {
      throw CoreError(invalid_argument("bytes has {} bytes; a block of group {} has {}",
                                       from.size(), group, bytes_of_group(layers)));
    }
    const nb::gil_scoped_release no_gil;
    for (size_t l = 0; l < layers.size(); ++l) {
      checksums_[checksum_at(slot, l)] = cache::checksum(page_of(from, layers[l]));
    }
    return write(slot, from).ok();
  }

  // All slots as they lie, uint8 [slots, bytes].
  nb::ndarray<nb::numpy, uint8_t> memory() {
    const size_t shape[] = {static_cast<size_t>(num_slots_), static_cast<size_t>(slot_bytes_)};
    return {memory_.data(), 2, shape, nb::find(this)};
  }

 private:
  struct Job {
    int64_t num_open = 0;
    int64_t bytes = 0;
    bool is_whole = true;
    std::shared_ptr<tier::TransferGroup> waited_for;  // null: drain_finished() has it
  };
  struct Copy {
    int64_t job = 0;
    size_t checksum = 0;  // its place in checksums_
    int64_t bytes = 0;
  };

  ArrayPlace place_of(const std::vector<std::vector<nb::object>>& groups) const {
    ArrayPlace place;
    place.owner = "first layer";
    if (!groups.empty() && !groups.front().empty()) {
      place.cuda_device = cuda_device_of(groups.front().front(), "pages");
    }
    if (place.cuda_device >= 0 && !stream_.is_none()) place.stream = stream_of(stream_);
    return place;
  }

  tier::TierLink link_to(const ArrayPlace& place) {
    if (place.cuda_device < 0) return tier::host_link();
    pinned_ = value_of(cache::pinned_memory(place.cuda_device));
    return value_of(tier::cuda_link(place.cuda_device, place.stream, *pinned_));
  }

  void push(Direction direction, int64_t job, int group, const std::vector<int64_t>& block_ids,
            const std::vector<int64_t>& slots) {
    check(group, block_ids, slots);
    for (size_t i = 0; i < slots.size(); ++i) {
      for (size_t l = 0; l < groups_[group].size(); ++l) {
        push_page(direction, job, groups_[group], l, block_ids[i], slots[i]);
      }
    }
    jobs_[job];  // one without blocks ends as well
  }

  void push_page(Direction direction, int64_t job, const std::vector<Layer>& layers, size_t l,
                 int64_t block, int64_t slot) {
    const Layer& layer = layers[l];
    auto* page = static_cast<uint8_t*>(layer.pages.array.data()) + block * layer.pages.page_stride;
    uint8_t* copy = memory_.data() + slot * slot_bytes_ + layer.offset;
    const int64_t tag = next_tag_++;
    copies_[tag] = {job, checksum_at(slot, l), layer.page_bytes};
    ++jobs_[job].num_open;
    const bool stores = direction == Direction::kStore;
    tier::Transfer transfer;
    transfer.direction = direction;
    transfer.block = {stores ? page : copy, stores ? copy : page, layer.page_bytes};
    transfer.tag = tag;
    transfer.group = jobs_[job].waited_for;
    queue_->push(std::move(transfer));
  }

  void check(int group, const std::vector<int64_t>& block_ids,
             const std::vector<int64_t>& slots) const {
    home_.check();
    if (group < 0 || group >= static_cast<int>(groups_.size())) {
      throw CoreError(invalid_argument("group is {}; expected 0 to {}", group, groups_.size() - 1));
    }
    check_slots(slots, block_ids, "block_ids");
    for (const Layer& layer : groups_[group]) {
      const auto num_pages = static_cast<int64_t>(layer.pages.array.shape(0));
      for (const int64_t id : block_ids) {
        if (id >= 0 && id < num_pages) continue;
        throw CoreError(out_of_range("a block is {}; the engine has {}", id, num_pages));
      }
    }
  }

  void check_slot(int group, int64_t slot) const {
    home_.check();
    if (group < 0 || group >= static_cast<int>(groups_.size())) {
      throw CoreError(invalid_argument("group is {}; expected 0 to {}", group, groups_.size() - 1));
    }
    check_slots({slot}, {slot}, "slots");
  }

  static int64_t bytes_of_group(const std::vector<Layer>& layers) {
    return layers.empty() ? 0 : layers.back().offset + layers.back().page_bytes;
  }
  template <class Byte>
  static std::span<Byte> page_of(std::span<Byte> slot, const Layer& layer) {
    return slot.subspan(static_cast<size_t>(layer.offset), static_cast<size_t>(layer.page_bytes));
  }
  size_t checksum_at(int64_t slot, size_t layer) const {
    return static_cast<size_t>(slot) * most_layers_ + layer;
  }

  // others: what goes with each slot.
  void check_slots(const std::vector<int64_t>& slots, const std::vector<int64_t>& others,
                   const char* name_of_others) const {
    if (others.size() != slots.size()) {
      throw CoreError(invalid_argument("{} has {} numbers and slots {}; expected as many",
                                       name_of_others, others.size(), slots.size()));
    }
    for (const int64_t slot : slots) {
      if (slot >= 0 && slot < num_slots_) continue;
      throw CoreError(out_of_range("a slot is {}; expected 0 to {}", slot, num_slots_ - 1));
    }
  }

  Status read(int64_t slot, std::span<uint8_t> bytes) const {
    const uint8_t* from = memory_.data() + slot * slot_bytes_;
    if (files_ != nullptr) return files_->read(from, bytes);
    std::copy_n(from, bytes.size(), bytes.begin());
    return {};
  }

  Status write(int64_t slot, std::span<const uint8_t> bytes) {
    uint8_t* to = memory_.data() + slot * slot_bytes_;
    if (files_ != nullptr) return files_->write(to, bytes);
    std::ranges::copy(bytes, to);
    return {};
  }

  // Counts the copies that have finished in their jobs.
  void collect() {
    home_.check();
    finished_.clear();
    queue_->drain_finished(finished_);
    for (const tier::FinishedTransfer& done : finished_) {
      const auto found = copies_.find(done.tag);
      const Copy copy = found->second;
      copies_.erase(found);
      Job& job = jobs_[copy.job];
      --job.num_open;
      job.bytes += copy.bytes;
      cache::ContentHash& checksum = checksums_[copy.checksum];
      if (done.direction == Direction::kStore) checksum = done.block.checksum;
      job.is_whole = job.is_whole && done.block.is_copied && checksum == done.block.checksum;
    }
  }

  const nb::object stream_;
  const int64_t num_slots_;
  std::vector<std::vector<Layer>> groups_;
  int64_t slot_bytes_ = 0;
  size_t most_layers_ = 0;
  std::unique_ptr<cache::Memory> pinned_;  // null: the pages are the host's
  std::unique_ptr<cache::Memory> own_memory_;
  tier::FileMemory* files_ = nullptr;  // null: slots lie in memory
  cache::Region memory_;
  std::vector<cache::ContentHash> checksums_;  // [slots, most_layers_]
  std::unordered_map<int64_t, Copy> copies_;   // by tag
  std::unordered_map<int64_t, Job> jobs_;
  int64_t next_tag_ = 0;
  std::vector<tier::FinishedTransfer> finished_;
  const HomeProcess home_;
  std::unique_ptr<tier::TransferQueue> queue_;  // last: its thread reads and writes the memory
};

}  // namespace

void bind_host_blocks(nb::module_& module) {
  nb::class_<HostBlocks>(module, "HostBlocks")
      .def(nb::init<const std::vector<std::vector<nb::object>>&, int64_t, nb::object,
                    const nb::bytes&>(),
           nb::arg("groups"), nb::arg("num_slots"), nb::arg("stream").none() = nb::none(),
           nb::arg("folder") = nb::bytes(""))
      .def_prop_ro("slot_bytes", &HostBlocks::slot_bytes)
      .def("store", &HostBlocks::store, nb::arg("job"), nb::arg("group"), nb::arg("block_ids"),
           nb::arg("slots"))
      .def("load", &HostBlocks::load, nb::arg("job"), nb::arg("group"), nb::arg("block_ids"),
           nb::arg("slots"))
      .def("load_layer", &HostBlocks::load_layer, nb::arg("job"), nb::arg("group"),
           nb::arg("layer"), nb::arg("block_ids"), nb::arg("slots"))
      .def("end_layer", &HostBlocks::end_layer, nb::arg("job"))
      .def("read_slot", &HostBlocks::read_slot, nb::arg("group"), nb::arg("slot"))
      .def("write_slot", &HostBlocks::write_slot, nb::arg("group"), nb::arg("slot"),
           nb::arg("bytes"))
      .def("group_bytes", &HostBlocks::group_bytes, nb::arg("group"))
      .def("take", &HostBlocks::take, nb::arg("source"), nb::arg("from_slots"), nb::arg("slots"))
      .def("drain_finished", &HostBlocks::drain_finished)
      .def("wait_for_all", &HostBlocks::wait_for_all)
      .def_prop_ro("memory", &HostBlocks::memory);
}

}  // namespace kvx::python
