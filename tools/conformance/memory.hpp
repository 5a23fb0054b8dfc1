// Memory: all buffers of one call, with canaries around them, and the expected value of every byte
// after the call.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvx::conformance {

// [inaccessible page][canary][data][canary, up to 15 bytes][inaccessible page]
// Data begins on 16 bytes and ends as near to the last page as that allows, so that an access
// behind it faults.
class Buffer {
 public:
  Buffer(std::string name, int64_t num_bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;

  const std::string& name() const { return name_; }
  uint8_t* data() const { return data_; }
  int64_t size() const { return num_bytes_; }
  // Data and canaries.
  uint8_t* open_begin() const { return open_; }
  int64_t open_bytes() const { return open_bytes_; }
  bool holds(const void* address) const;
  // Makes the buffer inaccessible. Its addresses are not reused while the object exists.
  void close();

 private:
  std::string name_;
  int64_t num_bytes_;
  uint8_t* mapped_ = nullptr;
  int64_t mapped_bytes_ = 0;
  uint8_t* open_ = nullptr;
  int64_t open_bytes_ = 0;
  uint8_t* data_ = nullptr;
};

// A byte that differs from its expected value.
struct Difference {
  std::string buffer;
  int64_t offset;          // from the buffer's data; negative or beyond it: a canary
  const uint8_t* address;  // of the byte
  uint8_t found;
  uint8_t expected;
};

class Memory {
 public:
  // Filled with noise.
  Buffer& add(std::string name, int64_t num_bytes);
  // A buffer with a copy of a list.
  template <class T>
  T* add_list(std::string name, const std::vector<T>& list) {
    Buffer& buffer = add(std::move(name), static_cast<int64_t>(list.size() * sizeof(T)));
    T* data = reinterpret_cast<T*>(buffer.data());
    std::copy(list.begin(), list.end(), data);
    return data;
  }

  // Takes the present bytes as the expected ones, except those that expect() sets afterwards.
  void take_picture();
  // The expected byte at an address of one of the buffers. Requires: expected bytes were taken.
  uint8_t* expect(const void* address);
  std::optional<Difference> first_difference() const;

  void close() {
    for (const auto& buffer : buffers_) buffer->close();
  }

  const std::vector<std::unique_ptr<Buffer>>& buffers() const { return buffers_; }

 private:
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<std::vector<uint8_t>> pictures_;  // of the buffers' open bytes
};

}  // namespace kvx::conformance
