// One connection's TLS, as a filter of its Socket: OpenSSL's SSL object behind a mutex. For net/tls alone.
#pragma once

#include "paramwire/base/stream_filter.hpp"
#include "paramwire/net/tls.hpp"

#include <openssl/ssl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace paramwire {

struct SslFree {
  void operator()(SSL* ssl) const noexcept { SSL_free(ssl); }
};

// Every call takes the mutex for as long as it computes, which is at most a quarter of a MiB of cipher; none waits for the peer.
class TlsStream final : public StreamFilter {
 public:
  enum class Role : std::uint8_t { kClient, kServer };
  // How a handshake goes on: it is done, or waits until the socket can be read or written.
  enum class Step : std::uint8_t { kDone, kRead, kWrite };

  // `fd` and `peer` are the socket's; `context` holds the key for as long as this lives.
  // errors: kUnavailable when OpenSSL can't make a connection object.
  static Result<std::unique_ptr<TlsStream>> open(std::shared_ptr<const TlsContext> context, SSL_CTX* ssl_context, Role role, int fd, std::string peer,
                                                 std::uint64_t records_per_key);

  Result<Step> handshake();

  bool ready() const noexcept override;
  Result<std::optional<std::size_t>> try_receive(std::span<std::byte> into) override;
  Result<std::optional<std::size_t>> try_send(std::span<const iovec> parts) override;
  bool holds_input() const noexcept override;
  bool input_needs_room() const noexcept override;
  void finish() noexcept override;
  bool peer_is_plain() const noexcept override;
  void turn_away() noexcept override;
  std::optional<ExportedKey> export_key(std::string_view label, std::span<const std::byte> context) override;

  // For the BIO: at most one recv or send on the socket, with what came of it kept for the error text.
  int bio_read(char* into, int size, bool& retry) noexcept;
  int bio_write(const char* bytes, int size, bool& retry) noexcept;
  bool bio_eof() const noexcept { return eof_; }

  // What is received beyond what OpenSSL asks for, which is a record's head and its body in turn. With a head: all of a small record
  // (more would be copied once more, less would cost small ones another system call). With a body: the next head, so that a large
  // record costs one call, and lies where it is decrypted at once. OpenSSL's own reading ahead would move all that it holds to the
  // front of its buffer before each record.
  static constexpr std::size_t kHeadBytes = SSL3_RT_HEADER_LENGTH, kAheadBytes = 4096;

 private:
  TlsStream(std::shared_ptr<const TlsContext> context, Role role, int fd, std::string peer, std::uint64_t records_per_key)
      : context_(std::move(context)), role_(role), fd_(fd), peer_(std::move(peer)), records_per_key_(records_per_key) {}
  // All with the mutex held.
  Result<Step> shake();
  std::optional<Error> look_for_frame();
  Status check_peer();
  bool buffered() const noexcept { return ahead_at_ < ahead_end_ || SSL_has_pending(ssl_.get()) == 1; }
  Error failure(int ssl_error);
  Error handshake_failure(unsigned long code) const;
  Error turned_down(int alert) const;
  Result<std::span<const std::byte>> next_record(std::span<const iovec> parts, std::size_t skip);

  std::shared_ptr<const TlsContext> context_;
  Role role_;
  int fd_;
  std::string peer_;
  std::uint64_t records_per_key_;

  mutable std::mutex mutex_;
  std::unique_ptr<SSL, SslFree> ssl_;
  bool ready_ = false;
  bool sniffed_ = false;             // server: the first byte was looked at
  bool plain_peer_ = false;
  bool finished_ = false;            // a close was sent, or can't be
  bool holds_input_ = false;
  bool input_needs_room_ = false;
  std::optional<Error> input_error_;
  std::optional<Error> output_error_;
  std::size_t pending_ = 0;          // bytes of the record that is half on its way
  std::uint64_t records_ = 0;        // sent under the present key
  std::vector<std::byte> stage_;     // small parts, gathered for one record
  bool more_follows_ = false;        // the record that is being sent is not the last of its call
  std::array<char, kAheadBytes> ahead_{};  // received, and not asked for yet: [ahead_at_, ahead_end_)
  std::size_t ahead_at_ = 0, ahead_end_ = 0;
  std::array<char, 4> first_{};      // bytes that the peer sent, to tell what it speaks
  std::size_t first_have_ = 0;
  int errno_ = 0;                    // of the last recv or send that failed
  bool eof_ = false;
};

}  // namespace paramwire
