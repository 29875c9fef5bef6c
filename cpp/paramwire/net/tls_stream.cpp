#include "paramwire/net/tls_stream.hpp"

#include "paramwire/base/text.hpp"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/sslerr.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/socket.h>

namespace paramwire {

namespace {

// A record's plain text (RFC 8446 5.1).
constexpr std::size_t kRecordBytes = SSL3_RT_MAX_PLAIN_LENGTH;
// What one call encrypts and sends before others get their turn.
constexpr std::size_t kSendStep = 256 * 1024;

// First bytes of our frames as they lie in memory; TLS begins with 0x16.
constexpr std::string_view kFrameStart = "PWR1";

// Alerts (RFC 8446 6.2) that mean "your key is not mine": the check value failed, or no key was offered that is known.
constexpr int kIllegalParameter = 47, kDecryptError = 51, kHandshakeFailure = 40, kUnknownIdentity = 115, kMissingExtension = 109;
constexpr int kInternalError = 80;
// ERR_GET_REASON of an alert that the peer sent is this plus the alert's number (SSL_AD_REASON_OFFSET).
constexpr int kAlertReasons = 1000;

// ---------------------------------------------------------------- the BIO: recv and send without SIGPIPE

int read_bio(BIO* bio, char* into, int size) {
  bool retry = false;
  const int n = static_cast<TlsStream*>(BIO_get_data(bio))->bio_read(into, size, retry);
  BIO_clear_retry_flags(bio);
  if (retry) BIO_set_retry_read(bio);
  return n;
}

int write_bio(BIO* bio, const char* bytes, int size) {
  bool retry = false;
  const int n = static_cast<TlsStream*>(BIO_get_data(bio))->bio_write(bytes, size, retry);
  BIO_clear_retry_flags(bio);
  if (retry) BIO_set_retry_write(bio);
  return n;
}

long control_bio(BIO* bio, int command, long, void*) {
  if (command == BIO_CTRL_FLUSH) return 1;
  if (command == BIO_CTRL_EOF) return static_cast<const TlsStream*>(BIO_get_data(bio))->bio_eof() ? 1 : 0;
  return 0;
}

// Made once and never freed: connections may outlive every static object.
BIO_METHOD* socket_bio() {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "paramwire socket");
    if (made == nullptr) return made;
    BIO_meth_set_read(made, &read_bio);
    BIO_meth_set_write(made, &write_bio);
    BIO_meth_set_ctrl(made, &control_bio);
    return made;
  }();
  return method;
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

Result<std::unique_ptr<TlsStream>> TlsStream::open(std::shared_ptr<const TlsContext> context, SSL_CTX* ssl_context, Role role, int fd, std::string peer,
                                                   std::uint64_t records_per_key) {
  std::unique_ptr<TlsStream> out(new TlsStream(std::move(context), role, fd, std::move(peer), records_per_key));
  ERR_clear_error();
  out->ssl_.reset(SSL_new(ssl_context));
  BIO* bio = out->ssl_ && socket_bio() != nullptr ? BIO_new(socket_bio()) : nullptr;
  if (bio == nullptr) return Error(Code::kUnavailable, cat(out->peer_, ": OpenSSL has no memory for a connection"));
  BIO_set_data(bio, out.get());
  BIO_set_init(bio, 1);
  SSL_set_bio(out->ssl_.get(), bio, bio);  // which owns it now
  if (role == Role::kClient) SSL_set_connect_state(out->ssl_.get());
  else SSL_set_accept_state(out->ssl_.get());
  return out;
}

int TlsStream::bio_read(char* into, int size, bool& retry) noexcept {
  const auto wanted = static_cast<std::size_t>(size);
  if (ahead_at_ < ahead_end_) {
    const std::size_t n = std::min(wanted, ahead_end_ - ahead_at_);
    std::memcpy(into, ahead_.data() + ahead_at_, n);
    ahead_at_ += n;
    return static_cast<int>(n);
  }
  std::array<iovec, 2> parts{{{into, wanted}, {ahead_.data(), wanted <= kHeadBytes ? kAheadBytes : kHeadBytes}}};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  ssize_t n = 0;
  do n = ::recvmsg(fd_, &message, MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  if (n > 0) {
    const std::size_t given = std::min(static_cast<std::size_t>(n), wanted);
    ahead_at_ = 0;
    ahead_end_ = static_cast<std::size_t>(n) - given;
    const std::size_t kept = std::min(given, first_.size() - first_have_);
    std::memcpy(first_.data() + first_have_, into, kept);
    first_have_ += kept;
    return static_cast<int>(given);
  }
  if (n == 0) {
    eof_ = true;
  } else {
    retry = would_block(errno);
    if (!retry) errno_ = errno;
  }
  return static_cast<int>(n);
}

int TlsStream::bio_write(const char* bytes, int size, bool& retry) noexcept {
  ssize_t n = 0;
  // With MSG_MORE records go on in the same segment (tcp(7), TCP_CORK); a full socket sends what it has all the same.
  do n = ::send(fd_, bytes, static_cast<std::size_t>(size), MSG_DONTWAIT | MSG_NOSIGNAL | (more_follows_ ? MSG_MORE : 0));
  while (n < 0 && errno == EINTR);
  if (n < 0) {
    retry = would_block(errno);
    if (!retry) errno_ = errno;
  }
  return static_cast<int>(n);
}

// ---------------------------------------------------------------- errors

Error TlsStream::turned_down(int alert) const {
  const std::string& id = context_->key().id();
  if (alert == kIllegalParameter || alert == kDecryptError || alert == kHandshakeFailure || alert == kUnknownIdentity || alert == kMissingExtension) {
    return Error(Code::kDenied, cat(peer_, " does not have this side's cluster key (id ", id,
                                    "): give both the same file, and compare with \"paramwire key show-id FILE\" on each"));
  }
  if (alert == kInternalError) {
    return Error(Code::kBackpressure, cat(peer_, " turned this connection away before the handshake, as a server does at its limit of connections (connections_max): close some, or raise it"));
  }
  return Error(Code::kDenied, cat(peer_, " refused the TLS handshake: ", std::string_view(SSL_alert_desc_string_long(alert)), " (alert ", alert,
                                  "): is that a paramwire server that was started with --key?"));
}

Error TlsStream::handshake_failure(unsigned long code) const {
  const int reason = ERR_GET_REASON(code);
  if (role_ == Role::kClient && std::string_view(first_.data(), first_have_) == kFrameStart) {
    return Error(Code::kDenied, cat(peer_, " has no cluster key and speaks without TLS, and this client was given one (id ", context_->key().id(),
                                    "): start the server with --key FILE (key=FILE), or connect without a key"));
  }
  if (reason >= kAlertReasons) return turned_down(reason - kAlertReasons);
  if (role_ == Role::kClient && reason == SSL_R_CERTIFICATE_VERIFY_FAILED) {
    return Error(Code::kDenied, cat(peer_, " showed a certificate in place of the cluster key: that is no paramwire server with this key (id ", context_->key().id(), ')'));
  }
  if (role_ == Role::kServer && (reason == SSL_R_BINDER_DOES_NOT_VERIFY || reason == SSL_R_NO_SUITABLE_SIGNATURE_ALGORITHM || reason == SSL_R_NO_SHARED_CIPHER)) {
    return Error(Code::kDenied, cat(peer_, " has no cluster key, or another one"));
  }
  const char* text = ERR_reason_error_string(code);
  return Error(Code::kCorrupt, cat(peer_, ": the TLS handshake failed: ", std::string_view(text != nullptr ? text : "no reason given"),
                                   role_ == Role::kClient ? "; is that a paramwire server that was started with --key?" : ""));
}

Error TlsStream::failure(int ssl_error) {
  const unsigned long code = ERR_peek_error();
  ERR_clear_error();
  if (finished_) return Error(Code::kUnreachable, cat(peer_, ": this side ended the connection"));
  if (ssl_error == SSL_ERROR_ZERO_RETURN) return Error(Code::kUnreachable, cat(peer_, " closed the connection"));
  const bool lost = ssl_error == SSL_ERROR_SYSCALL || code == 0 || ERR_GET_REASON(code) == SSL_R_UNEXPECTED_EOF_WHILE_READING;
  if (lost && !eof_ && errno_ != 0) return errno_error(Code::kUnreachable, cat(peer_, ready_ ? ": connection" : ": TLS handshake"), errno_);
  if (lost && !ready_) return Error(Code::kUnreachable, cat(peer_, " closed the connection in the TLS handshake"));
  if (lost) return Error(Code::kUnreachable, cat(peer_, " is gone: the connection ended without a TLS close, as when the process dies or somebody cuts it"));
  if (!ready_) return handshake_failure(code);
  const char* text = ERR_reason_error_string(code);
  return Error(Code::kCorrupt, cat(peer_, ": a TLS record failed its check: ", std::string_view(text != nullptr ? text : "no reason given"), "; connect again"));
}

// ---------------------------------------------------------------- handshake

Result<TlsStream::Step> TlsStream::handshake() {
  const std::lock_guard lock(mutex_);
  return shake();
}

bool TlsStream::ready() const noexcept {
  const std::lock_guard lock(mutex_);
  return ready_;
}

// A client without a key begins with a frame. It is seen before OpenSSL would answer it in a language that the client does not speak.
std::optional<Error> TlsStream::look_for_frame() {
  char byte = 0;
  if (role_ != Role::kServer || sniffed_ || ::recv(fd_, &byte, 1, MSG_DONTWAIT | MSG_PEEK) != 1) return std::nullopt;
  sniffed_ = true;
  if (byte != kFrameStart.front()) return std::nullopt;
  plain_peer_ = true;
  return Error(Code::kDenied, "this server has a cluster key and takes nobody without it: connect with key=FILE (--key FILE), the same file as the server's");
}

bool TlsStream::peer_is_plain() const noexcept {
  const std::lock_guard lock(mutex_);
  return plain_peer_;
}

// What the handshake must have been, whatever made it succeed.
Status TlsStream::check_peer() {
  const bool by_key = SSL_session_reused(ssl_.get()) == 1 && SSL_get0_peer_certificate(ssl_.get()) == nullptr && SSL_version(ssl_.get()) == TLS1_3_VERSION;
  if (by_key) return {};
  return Error(Code::kDenied, cat(peer_, " did not prove the cluster key (id ", context_->key().id(), ')'));
}

Result<TlsStream::Step> TlsStream::shake() {
  if (ready_) return Step::kDone;
  if (input_error_) return *input_error_;
  input_error_ = look_for_frame();
  if (input_error_) return *input_error_;
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl_.get());
  if (result == 1) {
    if (Status proved = check_peer(); !proved.ok()) input_error_ = output_error_ = proved.error();
    if (input_error_) return *input_error_;
    ready_ = true;
    holds_input_ = buffered();
    input_needs_room_ = false;
    return Step::kDone;
  }
  const int error = SSL_get_error(ssl_.get(), result);
  input_needs_room_ = error == SSL_ERROR_WANT_WRITE;
  if (error == SSL_ERROR_WANT_READ) return Step::kRead;
  if (error == SSL_ERROR_WANT_WRITE) return Step::kWrite;
  input_error_ = output_error_ = failure(error);
  return *input_error_;
}

void TlsStream::turn_away() noexcept {
  const std::lock_guard lock(mutex_);
  if (ready_ || finished_) return;
  finished_ = true;
  // An alert record, fatal, internal_error: before a handshake those are plain bytes (RFC 8446 5.1, 6).
  constexpr unsigned char kAlert[] = {21, 3, 3, 0, 2, 2, kInternalError};
  static_cast<void>(::send(fd_, kAlert, sizeof kAlert, MSG_DONTWAIT | MSG_NOSIGNAL));
}

// ---------------------------------------------------------------- bytes

bool TlsStream::holds_input() const noexcept {
  const std::lock_guard lock(mutex_);
  return holds_input_;
}

bool TlsStream::input_needs_room() const noexcept {
  const std::lock_guard lock(mutex_);
  return input_needs_room_;
}

Result<std::optional<std::size_t>> TlsStream::try_receive(std::span<std::byte> into) {
  const std::lock_guard lock(mutex_);
  PARAMWIRE_TRY(step, shake());
  if (step != Step::kDone) return std::optional<std::size_t>();
  std::size_t total = 0;
  bool more = true;
  while (total < into.size() && more && !input_error_) {
    ERR_clear_error();
    std::size_t n = 0;
    const int result = SSL_read_ex(ssl_.get(), into.data() + total, into.size() - total, &n);
    total += n;
    if (result == 1) continue;
    const int error = SSL_get_error(ssl_.get(), result);
    more = false;
    input_needs_room_ = error == SSL_ERROR_WANT_WRITE;
    if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) input_error_ = failure(error);
  }
  // What "would block" leaves inside is no whole record: only the kernel can help. An error that was not given yet is input, too.
  holds_input_ = input_error_.has_value() || (more && buffered());
  if (more) input_needs_room_ = false;
  if (total > 0) return std::optional(total);
  if (input_error_) return *input_error_;
  return std::optional<std::size_t>();
}

// The plain text of one record: `pending_` bytes when one is half on its way, else as many as fit. Large parts are taken where they lie.
Result<std::span<const std::byte>> TlsStream::next_record(std::span<const iovec> parts, std::size_t skip) {
  const std::size_t most = pending_ > 0 ? pending_ : kRecordBytes;
  std::size_t have = 0;
  for (const iovec& part : parts) {
    if (skip >= part.iov_len) {
      skip -= part.iov_len;
      continue;
    }
    const auto bytes = std::span(static_cast<const std::byte*>(part.iov_base), part.iov_len).subspan(std::exchange(skip, 0));
    const std::size_t take = std::min(bytes.size(), most - have);
    if (have == 0 && take == most) return bytes.first(take);
    stage_.resize(kRecordBytes);
    std::memcpy(stage_.data() + have, bytes.data(), take);
    have += take;
    if (have == most) break;
  }
  if (pending_ > have) return Error(Code::kInternal, cat(peer_, ": ", pending_, " bytes are half on their way, and the next call brought ", have));
  return std::span<const std::byte>(stage_).first(have);
}

Result<std::optional<std::size_t>> TlsStream::try_send(std::span<const iovec> parts) {
  const std::lock_guard lock(mutex_);
  if (output_error_) return *output_error_;
  if (!ready_) return std::optional<std::size_t>();
  if (finished_) return Error(Code::kUnreachable, cat(peer_, ": this side ended the connection"));
  std::size_t total = 0, all = 0;
  for (const iovec& part : parts) all += part.iov_len;
  while (total < kSendStep) {
    PARAMWIRE_TRY(record, next_record(parts, total));
    if (record.empty()) return std::optional(total);  // all of it went
    if (pending_ == 0 && records_ >= records_per_key_) {
      ERR_clear_error();
      if (SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED) != 1) {
        output_error_ = Error(Code::kInternal, cat(peer_, ": OpenSSL refused a new key after ", records_, " records"));
        return *output_error_;
      }
      records_ = 0;
    }
    more_follows_ = total + record.size() < std::min(all, kSendStep);
    ERR_clear_error();
    std::size_t n = 0;
    const int result = SSL_write_ex(ssl_.get(), record.data(), record.size(), &n);
    more_follows_ = false;
    if (result == 1) {
      pending_ = 0;
      ++records_;
      total += n;
      continue;
    }
    const int error = SSL_get_error(ssl_.get(), result);
    if (error == SSL_ERROR_WANT_WRITE || error == SSL_ERROR_WANT_READ) {
      pending_ = record.size();
      break;
    }
    output_error_ = failure(error);  // the peer's last words may still be there to be received
    if (total == 0) return *output_error_;
    break;
  }
  return total > 0 ? std::optional(total) : std::nullopt;
}

void TlsStream::finish() noexcept {
  const std::lock_guard lock(mutex_);
  // Half a record on its way: a close behind it would need to wait. The peer sees a cut, which is what this is.
  if (ready_ && !finished_ && !output_error_ && !input_error_ && pending_ == 0) {
    ERR_clear_error();
    static_cast<void>(SSL_shutdown(ssl_.get()));
    ERR_clear_error();
  }
  finished_ = true;
}

std::optional<ExportedKey> TlsStream::export_key(std::string_view label, std::span<const std::byte> context) {
  const std::lock_guard lock(mutex_);
  ExportedKey out{};
  if (!ready_) return std::nullopt;
  ERR_clear_error();
  const int ok = SSL_export_keying_material(ssl_.get(), reinterpret_cast<unsigned char*>(out.data()), out.size(), label.data(), label.size(),
                                            reinterpret_cast<const unsigned char*>(context.data()), context.size(), 1);
  return ok == 1 ? std::optional(out) : std::nullopt;
}

}  // namespace paramwire
