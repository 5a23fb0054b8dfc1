// Writes and gathers in a GPU's memory: the calls of the host's checks, copied there and back.
#include "tools/conformance/cuda_driver.hpp"
#include "tools/conformance/gather_call.hpp"
#include "tools/conformance/write_call.hpp"

namespace kvx::conformance {
namespace {

// The buffers of a Memory, including their canaries, in device memory.
class DeviceCopy {
 public:
  DeviceCopy(const Memory& memory, kvx_memory_type_t kind)
      : memory_(memory), kind_(kind), driver_(open_driver()) {
    for (const auto& buffer : memory.buffers()) {
      const auto bytes = static_cast<size_t>(buffer->open_bytes());
      void* copy = driver_.allocate(bytes, kind == KVX_MEMORY_UNIFIED);
      require(copy != nullptr, "the kit got no device memory for {}", buffer->name());
      require(driver_.copy_to_device(copy, buffer->open_begin(), bytes),
              "the kit could not fill device memory");
      copies_.push_back(static_cast<uint8_t*>(copy));
    }
  }

  template <class T>
  void carry(T*& pointer) const {
    if (pointer == nullptr) return;
    for (size_t i = 0; i < copies_.size(); ++i) {
      const Buffer& buffer = *memory_.buffers()[i];
      if (!buffer.holds(pointer)) continue;
      const auto offset = reinterpret_cast<const uint8_t*>(pointer) - buffer.open_begin();
      pointer = reinterpret_cast<T*>(copies_[i] + offset);
      return;
    }
  }
  void carry(kvx_tensor_desc_t& tensor) const {
    carry(tensor.data);
    tensor.memory = kind_;
  }
  void carry(kvx_cache_desc_t& cache) const {
    carry(cache.k);
    carry(cache.v);
    if (cache.pool.primary == nullptr) return;
    carry(cache.pool.primary);
    carry(cache.pool.secondary);
    cache.pool.memory = kind_;
  }
  void carry(kvx_kv_io_desc_t& io) const {
    carry(io.key);
    carry(io.value);
  }

  // Waits for the call's work and copies the buffers back to the host.
  void bring_back() const {
    require(driver_.synchronize(), "the device reports a fault");
    for (size_t i = 0; i < copies_.size(); ++i) {
      const Buffer& buffer = *memory_.buffers()[i];
      require(driver_.copy_to_host(buffer.open_begin(), copies_[i],
                                   static_cast<size_t>(buffer.open_bytes())),
              "the kit could not read device memory");
    }
  }

 private:
  static CudaDriver open_driver() {
    const auto driver = CudaDriver::open();
    require(driver.has_value(), "the kit could not open the GPU");
    return *driver;
  }

  const Memory& memory_;
  kvx_memory_type_t kind_;
  CudaDriver driver_;
  std::vector<uint8_t*> copies_;  // in the order of the memory's buffers
};

void write_on_device(const Provider& provider, const WriteCase& write_case,
                     kvx_memory_type_t kind) {
  WriteCall call(write_case);
  call.memory.take_picture();
  call.expect_moved();
  const DeviceCopy device(call.memory, kind);
  kvx_cache_desc_t cache = call.cache;
  kvx_write_desc_t write = call.write;
  device.carry(cache);
  device.carry(write.io);
  device.carry(write.slots.slots);
  device.carry(write.k_scale);
  device.carry(write.v_scale);
  device.carry(write.k_scale_desc.data);
  device.carry(write.v_scale_desc.data);
  require_status(provider.write_kv(&cache, &write, nullptr), KVX_STATUS_OK, "the write");
  device.bring_back();
  require_picture(call.memory, call.cache, call.write.io, "after the write");
}

void gather_on_device(const Provider& provider, const GatherCase& gather_case,
                      kvx_memory_type_t kind) {
  GatherCall call(gather_case);
  call.memory.take_picture();
  call.expect_moved();
  const DeviceCopy device(call.memory, kind);
  kvx_cache_desc_t cache = call.cache;
  kvx_gather_desc_t gather = call.gather;
  device.carry(cache);
  device.carry(gather.io);
  device.carry(gather.block_table.indices);
  device.carry(gather.block_table.indptr);
  device.carry(gather.seq_lens.lengths);
  require_status(provider.gather_kv(&cache, &gather, nullptr), KVX_STATUS_OK, "the gather");
  device.bring_back();
  require_picture(call.memory, call.cache, call.gather.io, "after the gather");
}

// On a device a slot out of range is skipped, because the host cannot read it without waiting.
void skips_slots_outside(const Provider& provider, kvx_memory_type_t kind) {
  WriteCall call(WriteCase{.slots = {20, INT32_MAX, -1}});
  call.memory.take_picture();
  const DeviceCopy device(call.memory, kind);
  kvx_cache_desc_t cache = call.cache;
  kvx_write_desc_t write = call.write;
  device.carry(cache);
  device.carry(write.io);
  device.carry(write.slots.slots);
  const kvx_status_t status = provider.write_kv(&cache, &write, nullptr);
  require(status == KVX_STATUS_OK || status == KVX_STATUS_OUT_OF_RANGE,
          "a write with slots outside returns {}, expected OK 0 or OUT_OF_RANGE 3",
          static_cast<int>(status));
  device.bring_back();
  require_picture(call.memory, call.cache, call.write.io, "after slots outside the cache");
}

void add_kind(std::vector<Check>& checks, kvx_memory_type_t kind, const std::string& name) {
  Features needs;
  needs.add(kMemoryTypes, kind)
      .add(kCacheDtypes, KVX_DTYPE_F16)
      .add(kIoDtypes, KVX_DTYPE_F16)
      .add(kTableFormats, KVX_BLOCK_TABLE_PACKED);
  const auto add = [&](const std::string& what, const Features& more,
                       std::function<void(const Provider&)> ask) {
    checks.push_back(
        {Section::kDevice, name + ": " + what, Features(needs).add(more), std::move(ask), true});
  };
  for (const Arrangement& arrangement : arrangements()) {
    Features layout = arrangement.needs() - Features().add(kMemoryTypes, KVX_MEMORY_HOST);
    add("write " + arrangement.name, layout, [=](const Provider& p) {
      for (const kvx_dtype_t slots : kIndexTypes) {
        write_on_device(p, {.arrangement = arrangement, .slot_dtype = slots}, kind);
      }
    });
    add("gather " + arrangement.name, layout, [=](const Provider& p) {
      gather_on_device(p, {.arrangement = arrangement}, kind);
      gather_on_device(p, {.arrangement = arrangement, .has_nulls = true}, kind);
    });
  }
  add("skip slots outside the cache", {}, [=](const Provider& p) { skips_slots_outside(p, kind); });
}

}  // namespace

std::vector<Check> device_checks() {
  std::vector<Check> checks;
  add_kind(checks, KVX_MEMORY_DEVICE, "device");
  add_kind(checks, KVX_MEMORY_UNIFIED, "unified");
  return checks;
}

}  // namespace kvx::conformance
