// A redis-server of Debian's on a free port of this machine, which ends with its object.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "tests/support/waits_until.hpp"

namespace kvx::tier {

// A port of this machine that nobody listens on. As long as this lives the kernel gives it to no
// other socket, neither to one that binds port 0 nor to one that connects; a server that sets
// SO_REUSEADDR, as Redis does, may bind it.
class ReservedPort {
 public:
  ReservedPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int one = 1;
    EXPECT_EQ(setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one), 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof address;
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), bytes), 0);
    EXPECT_EQ(getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &bytes), 0);
    number_ = ntohs(address.sin_port);
  }
  ~ReservedPort() { close(socket_); }
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;
  int number() const { return number_; }

 private:
  int socket_;
  int number_ = 0;
};

class RedisServer {
 public:
  enum class Wire { kPlain, kTls };
  // options: redis-server's, beside its port.
  explicit RedisServer(std::vector<std::string> options = {}, Wire wire = Wire::kPlain)
      : options_(std::move(options)), wire_(wire) {
    start();
  }
  ~RedisServer() { kill(); }
  RedisServer(const RedisServer&) = delete;
  RedisServer& operator=(const RedisServer&) = delete;

  int port() const { return port_.number(); }
  std::string url() const { return "redis://127.0.0.1:" + std::to_string(port()); }

  void start() {
    process_ = fork();
    if (process_ == 0) run();
    ASSERT_TRUE(tests::waits_until([this] { return is_listening(); }))
        << "redis-server does not listen";
  }
  // At once, as a crash does it.
  void kill() { end(SIGKILL); }
  void stop() const {
    ::kill(process_, SIGSTOP);
    waitpid(process_, nullptr, WUNTRACED);  // until it has stopped
  }
  void go_on() const { ::kill(process_, SIGCONT); }

  // All keys that begin with `begin`, and a value as redis-cli prints it: with a newline behind.
  std::vector<std::string> keys_under(const std::string& begin) const {
    std::vector<std::string> keys;
    std::string lines = output_of(client() + " --scan --pattern '" + begin + "*'");
    while (!lines.empty()) {
      const size_t end = lines.find('\n');
      keys.push_back(lines.substr(0, end));
      lines.erase(0, end == std::string::npos ? end : end + 1);
    }
    return keys;
  }
  std::string value_of(const std::string& key) const {
    return output_of(client() + " get '" + key + "'");
  }

 private:
  std::string client() const { return "redis-cli -p " + std::to_string(port()); }
  static std::string output_of(const std::string& command) {
    FILE* const pipe = popen(command.c_str(), "r");
    EXPECT_NE(pipe, nullptr);
    std::string all;
    char some[4096];
    for (size_t count; (count = fread(some, 1, sizeof some, pipe)) > 0;) all.append(some, count);
    EXPECT_EQ(pclose(pipe), 0) << command;
    return all;
  }
  void end(int signal) {
    if (process_ <= 0) return;
    ::kill(process_, signal);
    waitpid(process_, nullptr, 0);
    process_ = 0;
  }
  [[noreturn]] void run() const {
    std::vector<std::string> words = {"redis-server", "--bind", "127.0.0.1",  "--save", "",
                                      "--appendonly", "no",     "--loglevel", "warning"};
    if (wire_ == Wire::kTls) words.insert(words.end(), {"--port", "0", "--tls-port"});
    if (wire_ == Wire::kPlain) words.push_back("--port");
    words.push_back(std::to_string(port()));
    words.insert(words.end(), options_.begin(), options_.end());
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    if (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr)) _exit(126);
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // of a test that dies
    execvp("redis-server", arguments.data());
    _exit(127);
  }
  bool is_listening() const {
    const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool is_there =
        connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    close(socket);
    return is_there;
  }

  std::vector<std::string> options_;
  Wire wire_;
  ReservedPort port_;
  pid_t process_ = 0;
};

}  // namespace kvx::tier
