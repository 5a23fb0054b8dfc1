// Writes GGUF files for tests, byte by byte, so that any byte can be wrong.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace kvx::tests {

// Numbers of the file format, given anew: the tests must not take them from the code under test.
enum GgufNumber : uint32_t {
  kGgufU32 = 4,
  kGgufI32 = 5,
  kGgufF32 = 6,
  kGgufBool = 7,
  kGgufString = 8,
  kGgufArray = 9
};

class GgufWriter {
 public:
  template <class T>
  static void put(std::vector<uint8_t>& out, T value) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
    out.insert(out.end(), bytes, bytes + sizeof(T));
  }
  static void put_string(std::vector<uint8_t>& out, std::string_view text) {
    put<uint64_t>(out, text.size());
    out.insert(out.end(), text.begin(), text.end());
  }

  template <class T>
  void value(std::string_view key, uint32_t type, T number) {
    begin_value(key, type);
    put(values_, number);
  }
  void u32(std::string_view key, uint32_t number) { value(key, kGgufU32, number); }
  void f32(std::string_view key, float number) { value(key, kGgufF32, number); }
  void text(std::string_view key, std::string_view text) {
    begin_value(key, kGgufString);
    put_string(values_, text);
  }
  void strings(std::string_view key, const std::vector<std::string>& texts) {
    begin_value(key, kGgufArray);
    put<uint32_t>(values_, kGgufString);
    put<uint64_t>(values_, texts.size());
    for (const std::string& text : texts) put_string(values_, text);
  }
  void ints(std::string_view key, const std::vector<int32_t>& numbers) {
    begin_value(key, kGgufArray);
    put<uint32_t>(values_, kGgufI32);
    put<uint64_t>(values_, numbers.size());
    for (const int32_t number : numbers) put(values_, number);
  }

  void tensor(std::string_view name, uint32_t type, const std::vector<uint64_t>& dims,
              const std::vector<uint8_t>& data) {
    tensor_at(name, type, dims, data_.size());
    data_.insert(data_.end(), data.begin(), data.end());
    data_.resize((data_.size() + 31) / 32 * 32);
  }
  void f32_tensor(std::string_view name, const std::vector<uint64_t>& dims,
                  const std::vector<float>& numbers) {
    std::vector<uint8_t> bytes(numbers.size() * sizeof(float));
    std::memcpy(bytes.data(), numbers.data(), bytes.size());
    tensor(name, 0, dims, bytes);
  }
  // A header entry that claims its data lies at offset.
  void tensor_at(std::string_view name, uint32_t type, const std::vector<uint64_t>& dims,
                 uint64_t offset) {
    ++num_tensors_;
    put_string(tensors_, name);
    put<uint32_t>(tensors_, static_cast<uint32_t>(dims.size()));
    for (const uint64_t dim : dims) put(tensors_, dim);
    put<uint32_t>(tensors_, type);
    put<uint64_t>(tensors_, offset);
  }

  // What the header says instead of the truth.
  uint32_t version = 3;
  uint64_t extra_tensors = 0;
  uint64_t extra_values = 0;

  std::vector<uint8_t> file() const {
    std::vector<uint8_t> out{'G', 'G', 'U', 'F'};
    put(out, version);
    put<uint64_t>(out, num_tensors_ + extra_tensors);
    put<uint64_t>(out, num_values_ + extra_values);
    out.insert(out.end(), values_.begin(), values_.end());
    out.insert(out.end(), tensors_.begin(), tensors_.end());
    out.resize((out.size() + 31) / 32 * 32);
    out.insert(out.end(), data_.begin(), data_.end());
    return out;
  }

  void begin_value(std::string_view key, uint32_t type) {
    ++num_values_;
    put_string(values_, key);
    put(values_, type);
  }
  std::vector<uint8_t>& raw_values() { return values_; }

 private:
  std::vector<uint8_t> values_, tensors_, data_;
  uint64_t num_values_ = 0;
  uint64_t num_tensors_ = 0;
};

}  // namespace kvx::tests
