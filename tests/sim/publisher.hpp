// Simulated publishers: one in another process over frames, one inside the server that writes its payload line by line.
#pragma once

#include "sim/server.hpp"
#include "sim/world.hpp"

#include <memory>
#include <optional>
#include <vector>

namespace paramwire::sim {

class SimPublisher final : public Endpoint {
 public:
  SimPublisher(World& world, std::uint32_t number) : world_(world), number_(number) {}
  void start();
  void kill();
  void deliver(Connection& connection, std::span<const std::byte> bytes) override;
  void lost(Connection& connection) override;
  Micros frozen_until() const override { return frozen_until_; }
  void freeze(Micros time) { frozen_until_ = world_.now() + time; }

 private:
  enum class State : std::uint8_t { kIdle, kWelcome, kStart, kChanges, kFinish, kAbort };
  struct Change {
    FrameType type = FrameType::kPut;
    BlockId block;
    Checker::Block what;
    std::uint64_t crc = 0;
  };
  void later(Micros delay, std::function<void()> what);
  void act();
  void dial();
  void send(const Bytes& bytes) { world_.send(*connection_, 1, bytes); }
  void answer();
  void send_changes();
  void put(const World::Tensor& tensor);
  void changed(const Change& change, FrameType type);
  void conclude();
  void finish();
  void drop();

  World& world_;
  std::uint32_t number_;
  std::uint64_t life_ = 0;
  Micros frozen_until_ = 0;
  Connection* connection_ = nullptr;
  std::unique_ptr<FrameParser> parser_;
  State state_ = State::kIdle;
  std::uint64_t request_ = 0;
  std::optional<Incarnation> server_;
  std::optional<Version> newest_;      // as WELCOME or the last PUBLISHED said
  std::optional<PublishId> publish_;
  Incarnation publish_server_;
  std::map<std::uint64_t, Change> pending_;
  bool refused_ = false;               // some change was not taken as sent
  std::uint32_t repeats_ = 0;
};

class LocalPublisher {
 public:
  explicit LocalPublisher(World& world) : world_(world) {}
  void start();

 private:
  void act();
  void write(std::size_t from);
  void seal();
  void finish();
  bool gone() const { return server_ == nullptr || !server_->alive(); }

  World& world_;
  SimServer* server_ = nullptr;
  PublishId publish_;
  std::uint32_t puts_left_ = 0;
  std::optional<PutSlot> slot_;
  const World::Tensor* tensor_ = nullptr;
  Bytes source_;
  std::uint64_t key_ = 0;
};

}  // namespace paramwire::sim
