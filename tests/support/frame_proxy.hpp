// Between clients and a server, frame by frame: what goes by can be changed, lost, added to or cut off. For tests of what a peer believes.
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/base/socket.hpp"
#include "paramwire/wire/message.hpp"
#include "support/rig.hpp"

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <poll.h>
#include <thread>
#include <utility>

namespace paramwire::testing {

class FrameProxy {
 public:
  // Of each frame that goes by; `meta` may be changed. false: the frame is lost. One call at a time, by a thread of the proxy.
  using Edit = std::function<bool(bool from_server, FrameType type, Bytes& meta)>;

  FrameProxy(const Endpoint& server, Edit edit) : server_(server), edit_(std::move(edit)), listener_(must(Listener::open(Endpoint::tcp("127.0.0.1", 0)))) {
    acceptor_ = std::thread([this] { accept(); });
  }
  ~FrameProxy() {
    stopping_ = true;
    cut();
    acceptor_.join();
    cut();  // one that came meanwhile
    for (Pair& pair : pairs_) {
      pair.up.join();
      pair.down.join();
    }
  }
  FrameProxy(const FrameProxy&) = delete;
  FrameProxy& operator=(const FrameProxy&) = delete;

  const Endpoint& endpoint() const { return listener_.endpoint(); }
  std::size_t connections() const {
    const std::lock_guard lock(mutex_);
    return pairs_.size();
  }
  // As if the path between them was cut: both ends see the connection closed.
  void cut() {
    const std::lock_guard lock(mutex_);
    for (Pair& pair : pairs_) {
      pair.client.shutdown();
      pair.server.shutdown();
    }
  }
  // Bytes to every client, as if the server had sent them. Between two frames, if none is on its way.
  void send_to_clients(std::span<const std::byte> bytes) {
    const std::lock_guard lock(mutex_);
    for (Pair& pair : pairs_) must(pair.client.send_all(bytes, in_seconds(10)));
  }

 private:
  struct Pair {
    Socket client, server;
    std::thread up, down;
  };

  void accept() {
    while (!stopping_) {
      pollfd entry{listener_.fd(), POLLIN, 0};
      poll(&entry, 1, 10);
      auto accepted = listener_.try_accept();
      if (!accepted.ok() || !*accepted) continue;
      auto server = Socket::connect(server_, in_seconds(10));
      if (!server.ok()) continue;  // and the client sees its connection closed
      const std::lock_guard lock(mutex_);
      Pair& pair = pairs_.emplace_back();
      pair.client = std::move(**accepted);
      pair.server = std::move(*server);
      pair.up = std::thread([this, &pair] { pump(pair.client, pair.server, false); });
      pair.down = std::thread([this, &pair] { pump(pair.server, pair.client, true); });
    }
  }

  void pump(Socket& from, Socket& to, bool from_server) {
    while (forward(from, to, from_server)) {
    }
    from.shutdown();
    to.shutdown();
  }
  bool forward(Socket& from, Socket& to, bool from_server) {
    FrameHeader header{};
    if (!from.receive_all(std::as_writable_bytes(std::span(&header, 1)), kNever).ok() || verify(header) != nullptr) return false;
    Bytes meta(header.meta_size), body(static_cast<std::size_t>(header.body_size));
    if (!from.receive_all(meta, kNever).ok() || !from.receive_all(body, kNever).ok()) return false;
    {
      const std::lock_guard lock(edit_mutex_);
      if (!edit_(from_server, static_cast<FrameType>(header.type), meta)) return true;
    }
    Bytes frame;
    append_frame(frame, static_cast<FrameType>(header.type), header.request, meta, body.size());
    frame.insert(frame.end(), body.begin(), body.end());
    return to.send_all(frame, in_seconds(30)).ok();
  }

  const Endpoint server_;
  const Edit edit_;
  Listener listener_;
  std::atomic<bool> stopping_{false};
  std::mutex edit_mutex_;
  mutable std::mutex mutex_;
  std::list<Pair> pairs_;
  std::thread acceptor_;
};

// The meta of a message that was encoded.
inline Bytes meta_of(const Bytes& frame) { return {frame.begin() + sizeof(FrameHeader), frame.end()}; }

}  // namespace paramwire::testing
