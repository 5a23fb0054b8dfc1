// GpuTest has a device and a stream, or skips; Mirror keeps a test's host memory on the device.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cache/pool/memory.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::tests {

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    const Result<device::CudaDevice> device = device::open_cuda_device();
    if (!device.ok()) {
      const char* required = std::getenv("KVX_REQUIRE_GPU");
      if (required != nullptr && std::string(required) == "1") {
        FAIL() << "KVX_REQUIRE_GPU is 1: " << device.error().message;
      }
      GTEST_SKIP() << device.error().message;
    }
    auto memory = cache::cuda_memory(0);
    auto stream = device::OwnedCudaStream::create();
    ASSERT_TRUE(memory.ok() && stream.ok());
    memory_ = std::move(memory).value();
    stream_.emplace(std::move(stream).value());
    context_ = {device.value(), stream_->get()};
  }

  const ops::CudaContext& context() const { return context_; }
  cache::Memory& memory() { return *memory_; }
  void synchronize() {
    const Status status = device::cuda_synchronize(context_.stream);
    ASSERT_TRUE(status.ok()) << status.error().message;
  }

 private:
  std::unique_ptr<cache::Memory> memory_;
  std::optional<device::OwnedCudaStream> stream_;
  ops::CudaContext context_;
};

// Copies of pieces of host memory on the device, found by their host addresses.
class Mirror {
 public:
  explicit Mirror(cache::Memory& memory) : memory_(memory) {}

  // The device's copy of [host, host + bytes). Earlier copies of the same memory stay where they
  // are: K and V may have one table. at() and fetch() are of the latest.
  template <class T>
  T* add(T* host, int64_t count) {
    if (host == nullptr || count == 0) return nullptr;
    const auto* begin = reinterpret_cast<const uint8_t*>(host);
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    auto region = memory_.allocate(bytes, "a mirror");
    EXPECT_TRUE(region.ok());
    EXPECT_TRUE(device::cuda_copy(region.value().data(), begin, bytes).ok());
    uint8_t* data = region.value().data();
    Piece& piece = pieces_[begin];
    if (piece.bytes > 0) earlier_.push_back(std::move(piece.region));
    piece = {std::move(region).value(), bytes};
    return reinterpret_cast<T*>(data);
  }
  template <class T>
  auto* add(std::vector<T>& host) {
    return add(host.data(), std::ssize(host));
  }

  // The device's address of something inside a piece; null for null.
  template <class T>
  T* at(T* host) const {
    if (host == nullptr) return nullptr;
    const auto* address = reinterpret_cast<const uint8_t*>(host);
    const auto piece = std::prev(pieces_.upper_bound(address));
    EXPECT_LT(address, piece->first + piece->second.bytes) << "not mirrored";
    return reinterpret_cast<T*>(piece->second.region.data() + (address - piece->first));
  }

  // What the device holds now, back into the host's memory.
  template <class T>
  void fetch(std::vector<T>& host) const {
    if (host.empty()) return;
    const int64_t bytes = std::ssize(host) * static_cast<int64_t>(sizeof(T));
    EXPECT_TRUE(device::cuda_copy(host.data(), at(host.data()), bytes).ok());
  }

 private:
  struct Piece {
    cache::Region region;
    int64_t bytes = 0;
  };
  cache::Memory& memory_;
  std::map<const uint8_t*, Piece> pieces_;
  std::vector<cache::Region> earlier_;
};

// The counters of verbs, on the device.
class DeferredErrors {
 public:
  explicit DeferredErrors(cache::Memory& memory)
      : region_(memory.allocate(sizeof(ops::DeviceCounters), "counters").value()) {}
  ops::DeviceCounters* get() const {
    return reinterpret_cast<ops::DeviceCounters*>(region_.data());
  }
  ops::DeviceCounters read() const {
    ops::DeviceCounters found;
    EXPECT_TRUE(device::cuda_copy(&found, region_.data(), sizeof found).ok());
    return found;
  }

 private:
  cache::Region region_;
};

}  // namespace kvx::tests
