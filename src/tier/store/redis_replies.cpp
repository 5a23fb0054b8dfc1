// RedisReplies: hiredis' reader with our own objects.
#include "tier/store/redis_replies.hpp"

#include <hiredis/read.h>

#include <charconv>
#include <new>

namespace kvx::tier {
namespace {

// Into its list, which owns it; or to the reader, which returns it. Null: no memory.
void* put(const redisReadTask* task, std::unique_ptr<RedisReply> reply) {
  if (task->parent == nullptr) return reply.release();
  auto* const list = static_cast<RedisReply*>(task->parent->obj);
  list->elements.push_back(std::move(reply));
  return list->elements.back().get();
}

// No exception passes through hiredis.
template <class Fill>
void* make(const redisReadTask* task, const Fill& fill) {
  try {
    auto reply = std::make_unique<RedisReply>();
    fill(*reply);
    return put(task, std::move(reply));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void* make_text(const redisReadTask* task, char* text, size_t bytes) {
  return make(task, [&](RedisReply& reply) {
    using enum RedisReply::Kind;
    reply.kind = task->type == REDIS_REPLY_ERROR    ? kError
                 : task->type == REDIS_REPLY_STATUS ? kStatus
                                                    : kText;
    reply.text.assign(text, bytes);
  });
}

void* make_list(const redisReadTask* task, int) {
  return make(task, [](RedisReply& reply) { reply.kind = RedisReply::Kind::kList; });
}

void* make_number(const redisReadTask* task, long long number) {
  return make(task, [number](RedisReply& reply) {
    reply.kind = RedisReply::Kind::kNumber;
    reply.number = number;
  });
}

void* make_nothing(const redisReadTask* task) {
  return make(task, [](RedisReply&) {});
}

// Called for whole replies alone: a list owns its elements.
void free_reply(void* reply) {
  delete static_cast<RedisReply*>(reply);
}

redisReplyObjectFunctions kFunctions = {make_text, make_list, make_number, make_nothing,
                                        free_reply};

}  // namespace

std::optional<RedisTextHead> read_text_head(std::span<const uint8_t> bytes) {
  const auto* const begin = reinterpret_cast<const char*>(bytes.data());
  const char* const end = begin + bytes.size();
  RedisTextHead head;
  if (bytes.empty() || *begin != '$') return std::nullopt;
  const auto [stop, problem] = std::from_chars(begin + 1, end, head.text_bytes);
  if (problem != std::errc() || head.text_bytes < 0) return std::nullopt;
  if (end - stop < 2 || stop[0] != '\r' || stop[1] != '\n') return std::nullopt;
  head.head_bytes = static_cast<size_t>(stop + 2 - begin);
  return head;
}

void RedisReplies::FreeReader::operator()(redisReader* reader) const {
  redisReaderFree(reader);
}

RedisReplies::RedisReplies(int64_t max_reply_bytes)
    : reader_(redisReaderCreateWithFunctions(&kFunctions)), max_reply_bytes_(max_reply_bytes) {
  if (!reader_) throw std::bad_alloc();
}

Status RedisReplies::feed(std::span<const uint8_t> bytes) {
  num_fed_ += std::ssize(bytes);
  if (redisReaderFeed(reader_.get(), reinterpret_cast<const char*>(bytes.data()), bytes.size()) ==
      REDIS_OK) {
    return {};
  }
  return internal_error("the store's answer is none: {}", reader_->errstr);
}

Result<std::unique_ptr<RedisReply>> RedisReplies::next() {
  void* reply = nullptr;
  if (redisReaderGetReply(reader_.get(), &reply) != REDIS_OK) {
    return internal_error("the store's answer is none: {}", reader_->errstr);
  }
  if (reply != nullptr) {
    num_fed_ = 0;
    return std::unique_ptr<RedisReply>(static_cast<RedisReply*>(reply));
  }
  if (num_fed_ > max_reply_bytes_) {
    return internal_error("the store's answer is larger than {} bytes", max_reply_bytes_);
  }
  return std::unique_ptr<RedisReply>();
}

bool RedisReplies::is_empty() const {
  return num_fed_ == 0 && reader_->pos == reader_->len;
}

}  // namespace kvx::tier
