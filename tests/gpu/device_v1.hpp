// A test's v1 cache and IO on the device: the call there, and its bytes back in the host's memory.
#pragma once

#include "tests/api/v1_gather.hpp"
#include "tests/gpu/gpu.hpp"

namespace kvx::tests {

class DeviceV1 {
 public:
  explicit DeviceV1(cache::Memory& memory) : mirror_(memory) {}

  // Copies the memory of a cache or IO tensor; the descriptors of it are carried by the calls
  // below.
  template <class Tensors>
  void add(Tensors& tensors) {
    for (api_test::Memory* memory : {&tensors.k_memory, &tensors.v_memory}) {
      mirror_.add(memory->bytes());
      carried_.push_back(memory);
    }
  }
  template <class T>
  T* add(std::vector<T>& array) {
    return mirror_.add(array);
  }

  kvx_tensor_desc_t carried(kvx_tensor_desc_t tensor) const {
    tensor.data = mirror_.at(static_cast<uint8_t*>(tensor.data));
    tensor.memory = KVX_MEMORY_DEVICE;
    return tensor;
  }
  kvx_cache_desc_t carried(kvx_cache_desc_t cache) const {
    cache.k = carried(cache.k);
    cache.v = carried(cache.v);
    return cache;
  }
  kvx_kv_io_desc_t carried(kvx_kv_io_desc_t io) const {
    io.key = carried(io.key);
    io.value = carried(io.value);
    return io;
  }

  void fetch() const {
    for (api_test::Memory* memory : carried_) mirror_.fetch(memory->bytes());
  }

 private:
  Mirror mirror_;
  std::vector<api_test::Memory*> carried_;
};

}  // namespace kvx::tests
