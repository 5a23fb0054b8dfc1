// FieldWriter, FieldReader: the fields of what travels, one after the other, the lowest byte first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kvx::transfer {

class FieldWriter {
 public:
  void u32(uint32_t value) { number(value, 4); }
  void u64(uint64_t value) { number(value, 8); }
  void text(const std::string& text) { bytes_.insert(bytes_.end(), text.begin(), text.end()); }
  void data(std::span<const uint8_t> data) {
    bytes_.insert(bytes_.end(), data.begin(), data.end());
  }
  std::span<const uint8_t> so_far() const { return bytes_; }
  std::vector<uint8_t> take() { return std::move(bytes_); }

 private:
  void number(uint64_t value, int size) {
    for (int i = 0; i < size; ++i) bytes_.push_back(static_cast<uint8_t>(value >> (8 * i)));
  }
  std::vector<uint8_t> bytes_;
};

// Reads beyond the end give zeros, and is_whole() is false from then on.
class FieldReader {
 public:
  explicit FieldReader(std::span<const uint8_t> bytes) : left_(bytes) {}
  uint32_t u32() { return static_cast<uint32_t>(number(4)); }
  uint64_t u64() { return number(8); }
  std::string text(size_t length) {
    const std::span<const uint8_t> bytes = data(length);
    return {bytes.begin(), bytes.end()};
  }
  std::string rest() {
    if (left_.size() > kMostText) fail();
    return text(left_.size());
  }
  std::span<const uint8_t> data(size_t length) {
    if (length > left_.size()) fail();
    const std::span<const uint8_t> data = left_.first(std::min(length, left_.size()));
    left_ = left_.subspan(data.size());
    return data;
  }
  std::span<const uint8_t> data() { return std::exchange(left_, {}); }
  size_t num_left() const { return left_.size(); }
  bool is_whole() const { return is_whole_; }

 private:
  static constexpr size_t kMostText = 1 << 20;

  void fail() {
    is_whole_ = false;
    left_ = {};
  }
  uint64_t number(size_t size) {
    uint64_t value = 0;
    int shift = 0;
    for (const uint8_t byte : data(size)) {
      value |= uint64_t{byte} << shift;
      shift += 8;
    }
    return value;
  }
  std::span<const uint8_t> left_;
  bool is_whole_ = true;
};

}  // namespace kvx::transfer
