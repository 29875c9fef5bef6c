// TLS 1.3 with the cluster key as external pre-shared key, over any connected Socket (RFC 8446; OpenSSL 3).
//
// No certificates and nothing to negotiate: both ends prove that they hold the key (mode psk_dhe_ke: a fresh X25519 exchange gives each
// connection its own keys, so that a key that leaks later opens no recorded traffic), and there is one suite,
// TLS_AES_128_GCM_SHA256: AES-GCM is what processors have instructions for, the hash must be the key's (SHA-256, RFC 8446 4.2.11), and
// one suite can't be argued down. No tickets, no early data: there is nothing to replay. No renegotiation.
//
// Errors of a handshake: kDenied when one side lacks the key or has another, naming the next step; kBackpressure when the server
// turned this connection away; kCorrupt when the peer speaks no TLS. Later: kUnreachable when the peer ended the connection, by a TLS close or
// by cutting it off (the texts differ), kCorrupt for a record that fails its authentication. After an error nothing more comes out.
#pragma once

#include "paramwire/base/socket.hpp"
#include "paramwire/net/cluster_key.hpp"

#include <cstdint>
#include <memory>
#include <string>

namespace paramwire {

// Records that one key of a connection protects before it is replaced (KeyUpdate). RFC 8446 5.5 allows AES-GCM 2^24.5 full ones, about
// 388 GB; this is 256 GiB. More would wear the cipher's margin; fewer cost a message of 27 bytes each.
inline constexpr std::uint64_t kRecordsPerKey = std::uint64_t{1} << 24;

// Which ends of connections a context is for: OpenSSL takes a few hundred microseconds to set up each.
enum class TlsEnd : std::uint8_t { kBoth, kClient, kServer };

// What all connections of one key share. Any thread.
class TlsContext : public std::enable_shared_from_this<TlsContext> {
 public:
  // `records_per_key`: see kRecordsPerKey; tests bring less. errors: kUnavailable when OpenSSL has no such suite here.
  static Result<std::shared_ptr<const TlsContext>> create(std::shared_ptr<const ClusterKey> key, TlsEnd end = TlsEnd::kBoth,
                                                          std::uint64_t records_per_key = kRecordsPerKey);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  // The client's side: done when it returns ok. errors: as above; kTimeout; kInternal for a context of the other end.
  Status connect(Socket& socket, Micros deadline) const;
  // The server's side: the handshake goes on whenever `socket` receives, and no call waits. A peer that begins with a frame of ours
  // in place of TLS gets no answer of TLS and is an error kDenied of try_receive, whose text is meant for it.
  Status accept(Socket& socket) const;
  const ClusterKey& key() const noexcept { return *key_; }

  struct Contexts;  // OpenSSL's

 private:
  explicit TlsContext(std::shared_ptr<const ClusterKey> key);

  std::shared_ptr<const ClusterKey> key_;
  std::unique_ptr<Contexts> contexts_;
  std::uint64_t records_per_key_ = kRecordsPerKey;
};

// What options of servers and clients mean: the key of `file`, or `key`, or (both empty) nullptr.
// errors: kInvalid for both; as ClusterKey::load and TlsContext::create.
Result<std::shared_ptr<const TlsContext>> open_tls(const std::string& file, const std::shared_ptr<const ClusterKey>& key, TlsEnd end);

}  // namespace paramwire
