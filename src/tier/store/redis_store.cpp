// Redis as a store: commands of a batch are sent one behind the other, and their replies read then
// (pipelining). Each call takes a connection of its own from those at rest.
#include <algorithm>
#include <charconv>
#include <mutex>
#include <vector>

#include "tier/store/net_stream.hpp"
#include "tier/store/redis_replies.hpp"
#include "tier/store/remote_store.hpp"

namespace kvx::tier {
namespace {

constexpr int64_t kReplySlackBytes = 1 << 20;  // beside a value: lists of keys, texts of errors

struct RedisUrl {
  NetAddress address;
  std::string user;
  std::string password;
  int64_t database = 0;
};

Error bad_url() {  // never with the URL: it may contain a password
  return invalid_argument(
      "the store's URL is none of Redis'; expected redis://[user:password@]host[:port][/database], "
      "or rediss:// for TLS");
}

// %40 is @.
std::string decoded(std::string_view text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    uint8_t code = 0;
    if (text[i] == '%' && i + 2 < text.size() &&
        std::from_chars(text.data() + i + 1, text.data() + i + 3, code, 16).ptr ==
            text.data() + i + 3) {
      plain += static_cast<char>(code);
      i += 2;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

Result<RedisUrl> parse_url(std::string_view text) {
  RedisUrl url;
  if (text.starts_with("rediss://")) {
    url.address.has_tls = true;
    text.remove_prefix(9);
  } else if (text.starts_with("redis://")) {
    text.remove_prefix(8);
  } else {
    return bad_url();
  }
  if (const size_t at = text.rfind('@'); at != std::string_view::npos) {
    const std::string_view user = text.substr(0, at);
    const size_t colon = user.find(':');
    if (colon == std::string_view::npos) return bad_url();
    url.user = decoded(user.substr(0, colon));
    url.password = decoded(user.substr(colon + 1));
    text.remove_prefix(at + 1);
  }
  if (const size_t slash = text.find('/'); slash != std::string_view::npos) {
    const std::string_view database = text.substr(slash + 1);
    const char* const end = database.data() + database.size();
    const auto [stop, problem] = std::from_chars(database.data(), end, url.database);
    if (!database.empty() && (problem != std::errc() || stop != end || url.database < 0)) {
      return bad_url();
    }
    text = text.substr(0, slash);
  }
  url.address.port = "6379";
  const size_t after_brackets = text.starts_with('[') ? text.find(']') : 0;  // of IPv6
  if (after_brackets == std::string_view::npos) return bad_url();
  if (const size_t colon = text.find(':', after_brackets); colon != std::string_view::npos) {
    url.address.port = std::string(text.substr(colon + 1));
    text = text.substr(0, colon);
  }
  if (after_brackets > 0) text = text.substr(1, after_brackets - 1);
  url.address.host = std::string(text);
  const bool has_port = !url.address.port.empty() &&
                        url.address.port.find_first_not_of("0123456789") == std::string::npos;
  if (url.address.host.empty() || !has_port) return bad_url();
  return url;
}

// A command as RESP's list of texts.
template <class... Texts>
void add_command(std::string& out, const Texts&... texts) {
  out += fmt::format("*{}\r\n", sizeof...(texts));
  ((out += fmt::format("${}\r\n{}\r\n", std::string_view(texts).size(), std::string_view(texts))),
   ...);
}

std::span<const uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// One connection and the replies that it is owed.
class Connection {
 public:
  Connection(std::unique_ptr<NetStream> stream, int64_t max_reply_bytes)
      : stream_(std::move(stream)), replies_(max_reply_bytes), received_(256 << 10) {}

  Status send(std::string_view commands, Deadline deadline) {
    return stream_->write(bytes_of(commands), deadline);
  }
  Status send(std::span<const uint8_t> bytes, Deadline deadline) {
    return stream_->write(bytes, deadline);
  }

  Result<std::unique_ptr<RedisReply>> receive(Deadline deadline) {
    while (true) {
      KVX_ASSIGN_OR_RETURN(auto reply, replies_.next());
      if (reply) return reply;
      if (waiting_.empty()) KVX_RETURN_IF_ERROR(receive_more(received_.size(), deadline));
      KVX_RETURN_IF_ERROR(replies_.feed(waiting_));
      waiting_ = {};
    }
  }

  // The bytes of the text that the reply is, which go straight to the buffer; -1: there is none, or
  // it does not fit.
  Result<int64_t> receive_text(std::span<uint8_t> buffer, Deadline deadline) {
    if (!replies_.is_empty()) return receive_text_as_reply(buffer, deadline);
    while (waiting_.size() < kMostHeadBytes &&
           std::ranges::find(waiting_, '\n') == waiting_.end()) {
      // Little, so that the text does not pass through this memory.
      KVX_RETURN_IF_ERROR(receive_more(kLittleBytes, deadline));
    }
    const std::optional<RedisTextHead> head = read_text_head(waiting_);
    if (!head || head->text_bytes > std::ssize(buffer)) {
      return receive_text_as_reply(buffer, deadline);
    }
    waiting_ = waiting_.subspan(head->head_bytes);
    const std::span<uint8_t> text = buffer.first(static_cast<size_t>(head->text_bytes));
    size_t count = std::min(text.size(), waiting_.size());
    std::copy_n(waiting_.begin(), count, text.begin());
    waiting_ = waiting_.subspan(count);
    while (count < text.size()) {
      KVX_ASSIGN_OR_RETURN(const size_t more, stream_->read_some(text.subspan(count), deadline));
      count += more;
    }
    while (waiting_.size() < 2) KVX_RETURN_IF_ERROR(receive_more(kLittleBytes, deadline));
    if (waiting_[0] != '\r' || waiting_[1] != '\n') {
      return internal_error("the store's answer is none: a text has no end");
    }
    waiting_ = waiting_.subspan(2);
    return head->text_bytes;
  }

  // OK, or the error that the server gave.
  Status receive_ok(Deadline deadline) {
    KVX_ASSIGN_OR_RETURN(const auto reply, receive(deadline));
    if (reply->kind == RedisReply::Kind::kStatus) return {};
    return unexpected(*reply);
  }

  static Error unexpected(const RedisReply& reply) {
    if (reply.kind == RedisReply::Kind::kError) {
      return internal_error("the store refuses: {}", reply.text);
    }
    return internal_error("the store's answer is of another kind than expected");
  }

 private:
  static constexpr size_t kMostHeadBytes = 32;
  static constexpr size_t kLittleBytes = 4096;

  // At most this many bytes behind those that wait.
  Status receive_more(size_t most, Deadline deadline) {
    std::ranges::copy(waiting_, received_.begin());
    const size_t held = waiting_.size();
    const size_t room = std::min(most, received_.size() - held);
    KVX_ASSIGN_OR_RETURN(const size_t count,
                         stream_->read_some(std::span(received_).subspan(held, room), deadline));
    waiting_ = std::span(received_).first(held + count);
    return {};
  }

  Result<int64_t> receive_text_as_reply(std::span<uint8_t> buffer, Deadline deadline) {
    KVX_ASSIGN_OR_RETURN(const auto reply, receive(deadline));
    if (reply->kind == RedisReply::Kind::kNothing) return -1;
    if (reply->kind != RedisReply::Kind::kText) return unexpected(*reply);
    if (reply->text.size() > buffer.size()) return -1;
    std::ranges::copy(reply->text, buffer.begin());
    return std::ssize(reply->text);
  }

  std::unique_ptr<NetStream> stream_;
  RedisReplies replies_;
  std::vector<uint8_t> received_;
  std::span<const uint8_t> waiting_;  // of received_, not in replies_ yet
};

bool is_no_room(const RedisReply& reply) {
  return reply.kind == RedisReply::Kind::kError && reply.text.starts_with("OOM");
}

class RedisStore final : public RemoteStore {
 public:
  RedisStore(RedisOptions options, RedisUrl url)
      : options_(std::move(options)), url_(std::move(url)) {}

  Status put(std::span<StorePut> items) override {
    return call([&](Connection& to, Deadline deadline) -> Status {
      const std::string ttl = std::to_string(options_.ttl_seconds);
      std::string head;
      for (const StorePut& item : items) {
        // The value stays where it is: SET's head and the end of its line go around it.
        head += options_.ttl_seconds > 0 ? "*5\r\n" : "*3\r\n";
        head += fmt::format("$3\r\nSET\r\n${}\r\n{}\r\n${}\r\n", item.key.size(), item.key,
                            item.value.size());
        KVX_RETURN_IF_ERROR(to.send(head, deadline));
        KVX_RETURN_IF_ERROR(to.send(item.value, deadline));
        head = "\r\n";
        if (options_.ttl_seconds > 0) {
          head += fmt::format("$2\r\nEX\r\n${}\r\n{}\r\n", ttl.size(), ttl);
        }
      }
      KVX_RETURN_IF_ERROR(to.send(head, deadline));
      for (StorePut& item : items) {
        KVX_ASSIGN_OR_RETURN(const auto reply, to.receive(deadline));
        item.is_stored = reply->kind == RedisReply::Kind::kStatus;
        if (!item.is_stored && !is_no_room(*reply)) return Connection::unexpected(*reply);
      }
      return {};
    });
  }

  Status get(std::span<StoreGet> items) override {
    return get_each(items, [](size_t) {});
  }

  Status get_each(std::span<StoreGet> items, const Arrived& arrived) override {
    return call([&](Connection& to, Deadline deadline) -> Status {
      std::string commands;
      for (const StoreGet& item : items) add_command(commands, "GET", item.key);
      KVX_RETURN_IF_ERROR(to.send(commands, deadline));
      for (size_t i = 0; i < items.size(); ++i) {
        KVX_ASSIGN_OR_RETURN(items[i].num_bytes, to.receive_text(items[i].buffer, deadline));
        arrived(i);
      }
      return {};
    });
  }

  Status exists(std::span<const std::string> keys, std::span<uint8_t> has) override {
    return call([&](Connection& to, Deadline deadline) -> Status {
      std::string commands;
      for (const std::string& key : keys) add_command(commands, "EXISTS", key);
      KVX_RETURN_IF_ERROR(to.send(commands, deadline));
      for (size_t i = 0; i < keys.size(); ++i) {
        KVX_ASSIGN_OR_RETURN(const auto reply, to.receive(deadline));
        if (reply->kind != RedisReply::Kind::kNumber) return Connection::unexpected(*reply);
        has[i] = reply->number == 1 ? 1 : 0;
      }
      return {};
    });
  }

  Status remove(std::span<const std::string> keys) override {
    return call([&](Connection& to, Deadline deadline) { return unlink(to, keys, deadline); });
  }

  // Finds keys by SCAN, which holds the server up no longer than a GET does.
  Status remove_all(std::string_view parts) override {
    std::string cursor = "0";
    do {
      const Status done = call([&](Connection& to, Deadline deadline) -> Status {
        std::string command;
        add_command(command, "SCAN", cursor, "MATCH", fmt::format("{}/*", parts), "COUNT", "1000");
        KVX_RETURN_IF_ERROR(to.send(command, deadline));
        KVX_ASSIGN_OR_RETURN(const auto reply, to.receive(deadline));
        if (reply->elements.size() != 2) return Connection::unexpected(*reply);
        cursor = reply->elements[0]->text;
        std::vector<std::string> keys;
        for (const auto& one : reply->elements[1]->elements) keys.push_back(one->text);
        return unlink(to, keys, deadline);
      });
      KVX_RETURN_IF_ERROR(done);
    } while (cursor != "0" && !cursor.empty());
    return {};
  }

 private:
  static Status unlink(Connection& to, std::span<const std::string> keys, Deadline deadline) {
    std::string commands;
    for (const std::string& key : keys) add_command(commands, "UNLINK", key);
    KVX_RETURN_IF_ERROR(to.send(commands, deadline));
    for (size_t i = 0; i < keys.size(); ++i) {
      KVX_ASSIGN_OR_RETURN(const auto reply, to.receive(deadline));
      if (reply->kind != RedisReply::Kind::kNumber) return Connection::unexpected(*reply);
    }
    return {};
  }

  Deadline next_deadline() const {
    return std::chrono::steady_clock::now() + std::chrono::milliseconds(options_.timeout_ms);
  }

  Result<std::unique_ptr<Connection>> connect(Deadline deadline) const {
    KVX_ASSIGN_OR_RETURN(auto stream, NetStream::connect(url_.address, deadline));
    auto made = std::make_unique<Connection>(std::move(stream),
                                             options_.max_value_bytes + kReplySlackBytes);
    std::string commands;
    int num_commands = 0;
    if (!url_.password.empty()) {
      ++num_commands;
      if (url_.user.empty()) {
        add_command(commands, "AUTH", url_.password);
      } else {
        add_command(commands, "AUTH", url_.user, url_.password);
      }
    }
    if (url_.database != 0) {
      ++num_commands;
      add_command(commands, "SELECT", std::to_string(url_.database));
    }
    KVX_RETURN_IF_ERROR(made->send(commands, deadline));
    for (int i = 0; i < num_commands; ++i) KVX_RETURN_IF_ERROR(made->receive_ok(deadline));
    return made;
  }

  // A connection that failed is owed replies that nobody will read: it is dropped. One that had
  // rested may have been closed by the server meanwhile: then the call is made once more.
  template <class Use>
  Status call(const Use& use) {
    std::unique_ptr<Connection> connection = take_rested();
    if (connection && use(*connection, next_deadline()).ok()) {
      rest(std::move(connection));
      return {};
    }
    const Deadline deadline = next_deadline();
    KVX_ASSIGN_OR_RETURN(connection, connect(deadline));
    KVX_RETURN_IF_ERROR(use(*connection, deadline));
    rest(std::move(connection));
    return {};
  }
  std::unique_ptr<Connection> take_rested() {
    const std::lock_guard lock(mutex_);
    if (rested_.empty()) return nullptr;
    std::unique_ptr<Connection> one = std::move(rested_.back());
    rested_.pop_back();
    return one;
  }
  void rest(std::unique_ptr<Connection> connection) {
    const std::lock_guard lock(mutex_);
    rested_.push_back(std::move(connection));
  }

  const RedisOptions options_;
  const RedisUrl url_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Connection>> rested_;
};

}  // namespace

Result<std::unique_ptr<RemoteStore>> open_redis_store(RedisOptions options) {
  KVX_ASSIGN_OR_RETURN(RedisUrl url, parse_url(options.url));
  url.address.ca_file = options.ca_file;
  if (!options.password.empty()) url.password = options.password;
  return std::unique_ptr<RemoteStore>(
      std::make_unique<RedisStore>(std::move(options), std::move(url)));
}

}  // namespace kvx::tier
