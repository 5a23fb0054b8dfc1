// RedisReplies: a stream of RESP bytes to replies, by hiredis' reader. The bytes may be anything:
// what is no reply, or larger than was asked for, is an error, and nothing is allocated for what a
// reply only claims to contain.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/result.hpp"

struct redisReader;

namespace kvx::tier {

struct RedisReply {
  enum class Kind : uint8_t { kText, kStatus, kError, kNumber, kNothing, kList };
  Kind kind = Kind::kNothing;
  std::string text;           // of kText, kStatus and kError
  int64_t number = 0;         // of kNumber; of kText: its bytes
  bool is_in_buffer = false;  // its bytes are in the buffer, not in `text`
  std::vector<std::unique_ptr<RedisReply>> elements;
};

class RedisReplies {
 public:
  // A reply with more bytes is an error.
  explicit RedisReplies(int64_t max_reply_bytes);

  // Texts of the next replies go to the buffer where they fit in it, instead of to `text`.
  void set_buffer(std::span<uint8_t> buffer) { buffer_ = buffer; }
  std::span<uint8_t> buffer() const { return buffer_; }

  // INTERNAL_ERROR: no reply, or a larger one; nothing can be read from here on.
  Status feed(std::span<const uint8_t> bytes);
  // Null: more bytes are needed. Errors as feed's.
  Result<std::unique_ptr<RedisReply>> next();

 private:
  struct FreeReader {
    void operator()(redisReader* reader) const;
  };

  std::unique_ptr<redisReader, FreeReader> reader_;
  int64_t max_reply_bytes_;
  int64_t num_fed_ = 0;  // since the last whole reply
  std::span<uint8_t> buffer_;
};

}  // namespace kvx::tier
