// What may lie between a Socket's callers and its bytes: encryption (net/tls). base holds the seam, so that it links no
// cryptography; a Socket without a filter moves bytes as they are.
#pragma once

#include "paramwire/base/error.hpp"

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string_view>
#include <sys/uio.h>

namespace paramwire {

// A key that both ends of one connection can derive and nobody else: see StreamFilter::export_key.
using ExportedKey = std::array<std::byte, 32>;

// One connection's. Any thread: one may receive while another sends and a third one asks or finishes, as Socket allows.
class StreamFilter {
 public:
  virtual ~StreamFilter() = default;

  // Whether the handshake is over: until then nothing was received or sent of the callers' bytes.
  virtual bool ready() const noexcept = 0;
  // As Socket's, and they go on with the handshake. Bytes that were received before an error are given first.
  virtual Result<std::optional<std::size_t>> try_receive(std::span<std::byte> into) = 0;
  virtual Result<std::optional<std::size_t>> try_send(std::span<const iovec> parts) = 0;
  // try_receive has something to give that is no longer in the kernel: poll(2) would wait for it in vain.
  virtual bool holds_input() const noexcept = 0;
  // Receiving can't go on before the socket takes bytes: who waits for input must wait for room as well.
  virtual bool input_needs_room() const noexcept = 0;
  // Tells the peer that no more bytes come from here. Never waits.
  virtual void finish() noexcept = 0;
  // The peer began without a handshake, in the frames of those who have no filter.
  virtual bool peer_is_plain() const noexcept = 0;
  // Tells the peer, before a handshake, that this server takes nobody more. Never waits.
  virtual void turn_away() noexcept = 0;
  // 32 bytes that only the two ends of this connection know, others for each label and context. nullopt before the handshake is over.
  virtual std::optional<ExportedKey> export_key(std::string_view label, std::span<const std::byte> context) = 0;
};

}  // namespace paramwire
