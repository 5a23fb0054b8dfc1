// NetStream: sockets that do not block, and OpenSSL over them.
#include "tier/store/net_stream.hpp"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include "tier/store/socket/socket.hpp"

namespace kvx::tier {
namespace {

class PlainStream : public NetStream {
 public:
  explicit PlainStream(Socket socket) : socket_(std::move(socket)) {}

  Status write(std::span<const uint8_t> bytes, Deadline deadline) override {
    while (!bytes.empty()) {
      const Socket::Moved moved = socket_.send(bytes);
      if (moved.outcome == Socket::Outcome::kDone) {
        bytes = bytes.subspan(moved.bytes);
      } else {
        KVX_RETURN_IF_ERROR(wait_after(moved, Socket::Wish::kSend, deadline));
      }
    }
    return {};
  }

  Result<size_t> read_some(std::span<uint8_t> bytes, Deadline deadline) override {
    while (true) {
      const Socket::Moved moved = socket_.receive(bytes);
      if (moved.outcome == Socket::Outcome::kDone) return moved.bytes;
      KVX_RETURN_IF_ERROR(wait_after(moved, Socket::Wish::kReceive, deadline));
    }
  }

 protected:
  const Socket& socket() const { return socket_; }

 private:
  Status wait_after(const Socket::Moved& moved, Socket::Wish wish, Deadline deadline) const {
    if (moved.outcome == Socket::Outcome::kLater) return socket_.wait(wish, deadline);
    if (moved.outcome == Socket::Outcome::kFailed) return Socket::problem();
    return internal_error("the store has closed the connection");
  }

  Socket socket_;
};

struct FreeSsl {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};

// OpenSSL's own socket BIO would raise SIGPIPE when the other side has gone.
const Socket& socket_of(BIO* bio) {
  return *static_cast<const Socket*>(BIO_get_data(bio));
}
int result_of(const Socket::Moved& moved) {
  if (moved.outcome == Socket::Outcome::kDone) return static_cast<int>(moved.bytes);
  return moved.outcome == Socket::Outcome::kClosed ? 0 : -1;
}
int write_to_socket(BIO* bio, const char* bytes, int count) {
  const Socket::Moved moved =
      socket_of(bio).send({reinterpret_cast<const uint8_t*>(bytes), static_cast<size_t>(count)});
  BIO_clear_retry_flags(bio);
  if (moved.outcome == Socket::Outcome::kLater) BIO_set_retry_write(bio);
  return result_of(moved);
}
int read_from_socket(BIO* bio, char* bytes, int count) {
  const Socket::Moved moved =
      socket_of(bio).receive({reinterpret_cast<uint8_t*>(bytes), static_cast<size_t>(count)});
  BIO_clear_retry_flags(bio);
  if (moved.outcome == Socket::Outcome::kLater) BIO_set_retry_read(bio);
  return result_of(moved);
}
long control_socket(BIO*, int command, long, void*) {
  return command == BIO_CTRL_FLUSH ? 1 : 0;
}

BIO* bio_of(const Socket& socket) {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* const made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "kvx socket");
    BIO_meth_set_write(made, write_to_socket);
    BIO_meth_set_read(made, read_from_socket);
    BIO_meth_set_ctrl(made, control_socket);
    return made;
  }();
  BIO* const bio = BIO_new(method);
  BIO_set_data(bio, const_cast<Socket*>(&socket));
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
        return socket().wait(Socket::Wish::kReceive, deadline);
      case SSL_ERROR_WANT_WRITE:
        return socket().wait(Socket::Wish::kSend, deadline);
      default:
        return internal_error("TLS with the store has failed: {}", ssl_problem());
    }
  }

  std::unique_ptr<SSL_CTX, FreeSsl> context_;
  std::unique_ptr<SSL, FreeSsl> ssl_;
};

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
  KVX_ASSIGN_OR_RETURN(Socket socket, Socket::connect(address, deadline));
  if (address.has_tls) return begin_tls(address, std::move(socket), deadline);
  return std::unique_ptr<NetStream>(std::make_unique<PlainStream>(std::move(socket)));
}

}  // namespace kvx::tier
