#include "paramwire/net/tls.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/net/tls_stream.hpp"

#include <openssl/err.h>
#include <openssl/ssl.h>

#include <poll.h>
#include <string_view>

namespace paramwire {

namespace {

constexpr const char* kSuite = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kSuiteId[] = {0x13, 0x01};
// Of the key (RFC 8446 4.2.11). It travels in clear and is the same for every key: a cluster has one, and the check value tells a wrong one.
constexpr std::string_view kIdentity = "paramwire";

struct ContextFree {
  void operator()(SSL_CTX* context) const noexcept { SSL_CTX_free(context); }
};

Error openssl_error(std::string_view what) {
  const char* reason = ERR_reason_error_string(ERR_get_error());
  return Error(Code::kUnavailable, cat("OpenSSL: ", what, ": ", std::string_view(reason != nullptr ? reason : "no reason given")));
}

const ClusterKey& key_of(SSL* ssl) { return *static_cast<const ClusterKey*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl))); }

// The session that stands for the external key: OpenSSL's form of one. nullptr when memory is out.
SSL_SESSION* key_session(SSL* ssl) {
  const auto key = key_of(ssl).bytes();
  SSL_SESSION* session = SSL_SESSION_new();
  const SSL_CIPHER* suite = SSL_CIPHER_find(ssl, kSuiteId);
  if (session != nullptr && suite != nullptr && SSL_SESSION_set1_master_key(session, reinterpret_cast<const unsigned char*>(key.data()), key.size()) == 1 &&
      SSL_SESSION_set_cipher(session, suite) == 1 && SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1) {
    return session;
  }
  SSL_SESSION_free(session);
  return nullptr;
}

int use_key(SSL* ssl, const EVP_MD* digest, const unsigned char** id, std::size_t* id_size, SSL_SESSION** session) {
  *id = reinterpret_cast<const unsigned char*>(kIdentity.data());
  *id_size = kIdentity.size();
  // `digest` is set when the server asked once more with another hash: the key is for SHA-256 alone.
  *session = digest == nullptr || EVP_MD_is_a(digest, "SHA256") == 1 ? key_session(ssl) : nullptr;
  return digest != nullptr || *session != nullptr ? 1 : 0;
}

int find_key(SSL* ssl, const unsigned char* identity, std::size_t size, SSL_SESSION** session) {
  const bool ours = std::string_view(reinterpret_cast<const char*>(identity), size) == kIdentity;
  *session = ours ? key_session(ssl) : nullptr;
  return !ours || *session != nullptr ? 1 : 0;  // an unknown identity: no session, and the handshake fails for want of a certificate
}

Result<std::unique_ptr<SSL_CTX, ContextFree>> new_context(const ClusterKey& key, bool client) {
  ERR_clear_error();
  std::unique_ptr<SSL_CTX, ContextFree> out(SSL_CTX_new(client ? TLS_client_method() : TLS_server_method()));
  SSL_CTX* context = out.get();
  if (context == nullptr) return openssl_error("no context");
  SSL_CTX_set_app_data(context, const_cast<ClusterKey*>(&key));  // read only; key_of() gives the const back
  if (SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1 || SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) != 1) return openssl_error("no TLS 1.3");
  if (SSL_CTX_set_ciphersuites(context, kSuite) != 1) return openssl_error(kSuite);
  if (SSL_CTX_set1_groups_list(context, "X25519") != 1) return openssl_error("no X25519");
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
  // Also without them: a key exchange that is the key alone, changes of cipher for the sake of middle boxes, an end without a close.
  SSL_CTX_clear_options(context, SSL_OP_ALLOW_NO_DHE_KEX | SSL_OP_ENABLE_MIDDLEBOX_COMPAT | SSL_OP_IGNORE_UNEXPECTED_EOF | SSL_OP_ALLOW_UNSAFE_LEGACY_RENEGOTIATION);
  if (SSL_CTX_set_num_tickets(context, 0) != 1 || SSL_CTX_set_max_early_data(context, 0) != 1 || SSL_CTX_set_recv_max_early_data(context, 0) != 1) {
    return openssl_error("no tickets, no early data");
  }
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  // A server that shows a certificate has not proved the key. With nothing trusted, every certificate fails.
  if (client) SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_psk_use_session_callback(context, &use_key);
  SSL_CTX_set_psk_find_session_callback(context, &find_key);
  return out;
}

}  // namespace

struct TlsContext::Contexts {
  std::unique_ptr<SSL_CTX, ContextFree> client;
  std::unique_ptr<SSL_CTX, ContextFree> server;
};

TlsContext::TlsContext(std::shared_ptr<const ClusterKey> key) : key_(std::move(key)), contexts_(std::make_unique<Contexts>()) {}
TlsContext::~TlsContext() = default;

Result<std::shared_ptr<const TlsContext>> TlsContext::create(std::shared_ptr<const ClusterKey> key, TlsEnd end, std::uint64_t records_per_key) {
  const std::shared_ptr<TlsContext> context(new TlsContext(std::move(key)));
  if (end != TlsEnd::kServer) {
    PARAMWIRE_TRY(client, new_context(*context->key_, true));
    context->contexts_->client = std::move(client);
  }
  if (end != TlsEnd::kClient) {
    PARAMWIRE_TRY(server, new_context(*context->key_, false));
    context->contexts_->server = std::move(server);
  }
  context->records_per_key_ = records_per_key;
  return std::shared_ptr<const TlsContext>(context);
}

Result<std::shared_ptr<const TlsContext>> open_tls(const std::string& file, const std::shared_ptr<const ClusterKey>& key, TlsEnd end) {
  if (key && !file.empty()) return Error(Code::kInvalid, cat("a loaded key and the key file ", file, " were both given: give one"));
  if (key) return TlsContext::create(key, end);
  if (file.empty()) return std::shared_ptr<const TlsContext>();
  PARAMWIRE_TRY(loaded, ClusterKey::load(file));
  return TlsContext::create(std::move(loaded), end);
}

Status TlsContext::connect(Socket& socket, Micros deadline) const {
  if (!contexts_->client) return Error(Code::kInternal, "a TLS context for servers was used by a client");
  PARAMWIRE_TRY(stream, TlsStream::open(shared_from_this(), contexts_->client.get(), TlsStream::Role::kClient, socket.fd(), socket.peer(), records_per_key_));
  for (;;) {
    PARAMWIRE_TRY(step, stream->handshake());
    if (step == TlsStream::Step::kDone) break;
    // The socket itself is waited for: it has no filter yet, and the handshake has used up what it had received.
    const Status waited = socket.wait(step == TlsStream::Step::kRead ? POLLIN : POLLOUT, deadline);
    if (!waited.ok() && waited.error().code() == Code::kTimeout) {
      return Error(Code::kTimeout, cat(socket.peer(), ": the deadline passed in the TLS handshake: the server may be frozen, or it is no paramwire server"));
    }
    PARAMWIRE_CHECK(waited);
  }
  socket.set_filter(std::move(stream));
  return {};
}

Status TlsContext::accept(Socket& socket) const {
  if (!contexts_->server) return Error(Code::kInternal, "a TLS context for clients was used by a server");
  PARAMWIRE_TRY(stream, TlsStream::open(shared_from_this(), contexts_->server.get(), TlsStream::Role::kServer, socket.fd(), socket.peer(), records_per_key_));
  socket.set_filter(std::move(stream));
  return {};
}

}  // namespace paramwire
