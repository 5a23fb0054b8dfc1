// Buffers between inaccessible pages.
#include "tools/conformance/memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "tools/conformance/numbers.hpp"
#include "tools/conformance/system.hpp"

namespace kvx::conformance {

Buffer::Buffer(std::string name, int64_t num_bytes)
    : name_(std::move(name)), num_bytes_(num_bytes) {
  constexpr int64_t kAlignment = 16;
  constexpr int64_t kLeastCanary = 64;  // before the data
  const int64_t page = page_bytes();
  open_bytes_ = (num_bytes + kAlignment + kLeastCanary + page - 1) / page * page;
  mapped_bytes_ = open_bytes_ + 2 * page;
  mapped_ = map_pages(mapped_bytes_);
  if (mapped_ == nullptr) throw std::runtime_error("no memory for a buffer of " + name_);
  open_ = mapped_ + page;
  forbid_pages(mapped_, page);
  forbid_pages(open_ + open_bytes_, page);
  data_ = open_ + (open_bytes_ - num_bytes) / kAlignment * kAlignment;
  // The buffers of a call have different contents, so that bytes of a wrong buffer are detected.
  const uint64_t seed = std::hash<std::string>()(name_);
  for (int64_t i = 0; i < open_bytes_; ++i) {
    open_[i] = static_cast<uint8_t>(noise(seed + static_cast<uint64_t>(i)));
  }
}

Buffer::~Buffer() {
  unmap_pages(mapped_, mapped_bytes_);
}

void Buffer::close() {
  forbid_pages(open_, open_bytes_);
}

bool Buffer::holds(const void* address) const {
  const auto* byte = static_cast<const uint8_t*>(address);
  return byte >= open_ && byte < open_ + open_bytes_;
}

Buffer& Memory::add(std::string name, int64_t num_bytes) {
  return *buffers_.emplace_back(std::make_unique<Buffer>(std::move(name), num_bytes));
}

void Memory::take_picture() {
  pictures_.clear();
  for (const auto& buffer : buffers_) {
    pictures_.emplace_back(buffer->open_begin(), buffer->open_begin() + buffer->open_bytes());
  }
}

uint8_t* Memory::expect(const void* address) {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (!buffers_[i]->holds(address)) continue;
    return pictures_[i].data() + (static_cast<const uint8_t*>(address) - buffers_[i]->open_begin());
  }
  throw std::logic_error("the judge expects a byte outside its buffers");
}

std::optional<Difference> Memory::first_difference() const {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const Buffer& buffer = *buffers_[i];
    const std::vector<uint8_t>& picture = pictures_[i];
    const auto [found, expected] = std::mismatch(
        buffer.open_begin(), buffer.open_begin() + buffer.open_bytes(), picture.begin());
    if (expected == picture.end()) continue;
    return Difference{buffer.name(), found - buffer.data(), found, *found, *expected};
  }
  return std::nullopt;
}

}  // namespace kvx::conformance
