// NetStream: sockets that do not block, poll() up to the deadline, and OpenSSL over them.
#include "tier/store/net_stream.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvx::tier {
namespace {

Error timed_out() {
  return internal_error("the store has not answered in time");
}

// Until the socket takes or has bytes.
Status wait_for(int socket, short events, Deadline deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return timed_out();
    pollfd one{socket, events, 0};
    const int num_ready =
        poll(&one, 1, static_cast<int>(std::min<int64_t>(left.count() + 1, 1 << 30)));
    if (num_ready > 0) return {};
    if (num_ready < 0 && errno != EINTR) {
      return internal_error("the connection to the store is gone: {}", std::strerror(errno));
    }
  }
}

class Socket {
 public:
  explicit Socket(int number) : number_(number) {}
  Socket(Socket&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Socket& operator=(Socket&&) = delete;
  ~Socket() {
    if (number_ >= 0) close(number_);
  }
  int number() const { return number_; }

 private:
  int number_;
};

class PlainStream : public NetStream {
 public:
  explicit PlainStream(Socket socket) : socket_(std::move(socket)) {}

  Status write(std::span<const uint8_t> bytes, Deadline deadline) override {
    while (!bytes.empty()) {
      const ssize_t done = send(socket(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (done > 0) {
        bytes = bytes.subspan(static_cast<size_t>(done));
      } else {
        KVX_RETURN_IF_ERROR(wait_after(done, POLLOUT, deadline));
      }
    }
    return {};
  }

  Result<size_t> read_some(std::span<uint8_t> bytes, Deadline deadline) override {
    while (true) {
      const ssize_t done = recv(socket(), bytes.data(), bytes.size(), 0);
      if (done > 0) return static_cast<size_t>(done);
      KVX_RETURN_IF_ERROR(wait_after(done, POLLIN, deadline));
    }
  }

 protected:
  int socket() const { return socket_.number(); }

 private:
  Status wait_after(ssize_t done, short events, Deadline deadline) const {
    if (done == 0) return internal_error("the store has closed the connection");
    if (errno == EINTR) return {};
    if (errno == EAGAIN || errno == EWOULDBLOCK) return wait_for(socket(), events, deadline);
    return internal_error("the connection to the store is gone: {}", std::strerror(errno));
  }

  Socket socket_;
};

struct FreeSsl {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};

// OpenSSL's own socket BIO would raise SIGPIPE when the other side has gone.
int socket_of(BIO* bio) {
  return static_cast<int>(reinterpret_cast<intptr_t>(BIO_get_data(bio)));
}
int write_to_socket(BIO* bio, const char* bytes, int count) {
  const ssize_t done = send(socket_of(bio), bytes, static_cast<size_t>(count), MSG_NOSIGNAL);
  BIO_clear_retry_flags(bio);
  if (done < 0 && (errno == EAGAIN || errno == EINTR)) BIO_set_retry_write(bio);
  return static_cast<int>(done);
}
int read_from_socket(BIO* bio, char* bytes, int count) {
  const ssize_t done = recv(socket_of(bio), bytes, static_cast<size_t>(count), 0);
  BIO_clear_retry_flags(bio);
  if (done < 0 && (errno == EAGAIN || errno == EINTR)) BIO_set_retry_read(bio);
  return static_cast<int>(done);
}
long control_socket(BIO*, int command, long, void*) {
  return command == BIO_CTRL_FLUSH ? 1 : 0;
}

BIO* bio_of(int socket) {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* const made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "kvx socket");
    BIO_meth_set_write(made, write_to_socket);
    BIO_meth_set_read(made, read_from_socket);
    BIO_meth_set_ctrl(made, control_socket);
    return made;
  }();
  BIO* const bio = BIO_new(method);
  BIO_set_data(bio, reinterpret_cast<void*>(static_cast<intptr_t>(socket)));
  BIO_set_init(bio, 1);
  return bio;
}

std::string ssl_problem() {
  const unsigned long code = ERR_get_error();
  const char* const reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  ERR_clear_error();
  return reason == nullptr ? "the connection has ended" : reason;
}

class TlsStream final : public PlainStream {
 public:
  TlsStream(Socket socket, std::unique_ptr<SSL_CTX, FreeSsl> context,
            std::unique_ptr<SSL, FreeSsl> ssl)
      : PlainStream(std::move(socket)), context_(std::move(context)), ssl_(std::move(ssl)) {}

  Status shake_hands(Deadline deadline) {
    BIO* const bio = bio_of(socket());
    SSL_set_bio(ssl_.get(), bio, bio);
    while (true) {
      ERR_clear_error();
      const int done = SSL_connect(ssl_.get());
      if (done == 1) return {};
      KVX_RETURN_IF_ERROR(wait_after(done, deadline));
    }
  }

  Status write(std::span<const uint8_t> bytes, Deadline deadline) override {
    while (!bytes.empty()) {
      ERR_clear_error();
      size_t count = 0;
      const int done = SSL_write_ex(ssl_.get(), bytes.data(), bytes.size(), &count);
      if (done == 1) {
        bytes = bytes.subspan(count);
      } else {
        KVX_RETURN_IF_ERROR(wait_after(done, deadline));
      }
    }
    return {};
  }

  Result<size_t> read_some(std::span<uint8_t> bytes, Deadline deadline) override {
    while (true) {
      ERR_clear_error();
      size_t count = 0;
      const int done = SSL_read_ex(ssl_.get(), bytes.data(), bytes.size(), &count);
      if (done == 1) return count;
      KVX_RETURN_IF_ERROR(wait_after(done, deadline));
    }
  }

 private:
  Status wait_after(int done, Deadline deadline) {
    switch (SSL_get_error(ssl_.get(), done)) {
      case SSL_ERROR_WANT_READ:
        return wait_for(socket(), POLLIN, deadline);
      case SSL_ERROR_WANT_WRITE:
        return wait_for(socket(), POLLOUT, deadline);
      default:
        return internal_error("TLS with the store has failed: {}", ssl_problem());
    }
  }

  std::unique_ptr<SSL_CTX, FreeSsl> context_;
  std::unique_ptr<SSL, FreeSsl> ssl_;
};

struct FreeAddresses {
  void operator()(addrinfo* first) const { freeaddrinfo(first); }
};

Result<Socket> connect_to(const addrinfo& to, Deadline deadline) {
  Socket socket(::socket(to.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.number() < 0) return internal_error("no socket: {}", std::strerror(errno));
  if (connect(socket.number(), to.ai_addr, to.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return internal_error("no connection: {}", std::strerror(errno));
    KVX_RETURN_IF_ERROR(wait_for(socket.number(), POLLOUT, deadline));
    int problem = 0;
    socklen_t bytes = sizeof problem;
    getsockopt(socket.number(), SOL_SOCKET, SO_ERROR, &problem, &bytes);
    if (problem != 0) return internal_error("no connection: {}", std::strerror(problem));
  }
  const int yes = 1;
  setsockopt(socket.number(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  return socket;
}

Result<Socket> connect_any(const NetAddress& address, Deadline deadline) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int problem = getaddrinfo(address.host.c_str(), address.port.c_str(), &wanted, &found);
  if (problem != 0) {
    return internal_error("no host '{}': {}", address.host, gai_strerror(problem));
  }
  const std::unique_ptr<addrinfo, FreeAddresses> all(found);
  Error last = internal_error("no address");
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    Result<Socket> socket = connect_to(*one, deadline);
    if (socket.ok()) return socket;
    last = socket.error();
  }
  return last;
}

// The certificate must be this host's: of its name, or of its address.
bool expect_host(SSL* ssl, const std::string& host) {
  if (X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host.c_str()) == 1) return true;
  ERR_clear_error();
  return SSL_set1_host(ssl, host.c_str()) == 1 && SSL_set_tlsext_host_name(ssl, host.c_str()) == 1;
}

Result<std::unique_ptr<NetStream>> begin_tls(const NetAddress& address, Socket socket,
                                             Deadline deadline) {
  std::unique_ptr<SSL_CTX, FreeSsl> context(SSL_CTX_new(TLS_client_method()));
  if (!context) return internal_error("no TLS: {}", ssl_problem());
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  const bool has_certificates =
      address.ca_file.empty()
          ? SSL_CTX_set_default_verify_paths(context.get()) == 1
          : SSL_CTX_load_verify_locations(context.get(), address.ca_file.c_str(), nullptr) == 1;
  if (!has_certificates) {
    return internal_error("no certificates in '{}': {}", address.ca_file, ssl_problem());
  }
  std::unique_ptr<SSL, FreeSsl> ssl(SSL_new(context.get()));
  if (!ssl || !expect_host(ssl.get(), address.host)) {
    return internal_error("no TLS: {}", ssl_problem());
  }
  SSL_set_mode(ssl.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  auto stream = std::make_unique<TlsStream>(std::move(socket), std::move(context), std::move(ssl));
  KVX_RETURN_IF_ERROR(stream->shake_hands(deadline));
  return std::unique_ptr<NetStream>(std::move(stream));
}

}  // namespace

Result<std::unique_ptr<NetStream>> NetStream::connect(const NetAddress& address,
                                                      Deadline deadline) {
  KVX_ASSIGN_OR_RETURN(Socket socket, connect_any(address, deadline));
  if (address.has_tls) return begin_tls(address, std::move(socket), deadline);
  return std::unique_ptr<NetStream>(std::make_unique<PlainStream>(std::move(socket)));
}

}  // namespace kvx::tier
