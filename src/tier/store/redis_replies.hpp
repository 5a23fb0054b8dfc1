// RedisReplies: a stream of RESP bytes to replies, by hiredis' reader. The bytes may be anything:
// what is no reply, or larger than was asked for, is an error, and nothing is allocated for what a
// reply only claims to contain.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/result.hpp"

struct redisReader;

namespace kvx::tier {

struct RedisReply {
  enum class Kind : uint8_t { kText, kStatus, kError, kNumber, kNothing, kList };
  Kind kind = Kind::kNothing;
  std::string text;    // of kText, kStatus and kError
  int64_t number = 0;  // of kNumber
  std::vector<std::unique_ptr<RedisReply>> elements;
};

// What the head of a text says: "$5\r\n" announces 5 bytes and the end of a line.
struct RedisTextHead {
  int64_t text_bytes = 0;
  size_t head_bytes = 0;
};
// Nothing: the bytes begin with no whole head of a text.
std::optional<RedisTextHead> read_text_head(std::span<const uint8_t> bytes);

class RedisReplies {
 public:
  // A reply with more bytes is an error.
  explicit RedisReplies(int64_t max_reply_bytes);

  // INTERNAL_ERROR: no reply, or a larger one; nothing can be read from here on.
  Status feed(std::span<const uint8_t> bytes);
  // Null: more bytes are needed. Errors as feed's.
  Result<std::unique_ptr<RedisReply>> next();
  // Whether all that was fed has been returned: another may read the next reply.
  bool is_empty() const;

 private:
  struct FreeReader {
    void operator()(redisReader* reader) const;
  };

  std::unique_ptr<redisReader, FreeReader> reader_;
  int64_t max_reply_bytes_;
  int64_t num_fed_ = 0;  // since the last whole reply
};

}  // namespace kvx::tier
