#include "sim/publisher.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cstring>

namespace paramwire::sim {

void SimPublisher::later(Micros delay, std::function<void()> what) {
  world_.after(delay, Lane::kPassive, [this, life = life_, what = std::move(what)] {
    if (life != life_) return;
    if (world_.now() < frozen_until_) return later(frozen_until_ - world_.now(), what);
    what();
  });
}

void SimPublisher::start() {
  later(static_cast<Micros>(world_.random().below(1500)), [this] { act(); });
}

void SimPublisher::kill() {
  ++life_;
  if (connection_ != nullptr) world_.cut(*connection_);
  drop();
  publish_.reset();
  start();
}

void SimPublisher::drop() {
  connection_ = nullptr;
  parser_.reset();
  state_ = State::kIdle;
  pending_.clear();
}

void SimPublisher::act() {
  later(static_cast<Micros>(400 + world_.random().below(2500)), [this] { act(); });
  if (state_ != State::kIdle) return;
  if (world_.stopping()) {
    if (publish_ && connection_ != nullptr) {
      send(PublishIdMessage{*publish_, {}}.encode(FrameType::kAbort, ++request_));
      publish_.reset();
    }
    return;
  }
  if (connection_ == nullptr) return dial();
  if (publish_) return finish();  // the reply to FINISH was lost, or it was put off
  PublishStartMessage start;
  if (world_.random().chance(40)) {
    start.any_base = false;
    start.base = newest_;
  }
  state_ = State::kStart;
  send(start.encode(++request_));
}

void SimPublisher::dial() {
  connection_ = world_.connect(*this, Lane::kPassive);
  if (connection_ == nullptr) return;
  parser_ = std::make_unique<FrameParser>();
  state_ = State::kWelcome;
  send(HelloMessage{{1000 + number_, 1}, number_}.encode(++request_));
  const std::uint64_t id = connection_->id;
  later(40'000, [this, id] {  // no connection is kept longer: some are half-open
    if (connection_ == nullptr || connection_->id != id) return;
    Connection& connection = *connection_;
    world_.cut(connection);
    lost(connection);
  });
}

void SimPublisher::lost(Connection& connection) {
  if (connection_ != &connection) return;
  if (state_ != State::kFinish && state_ != State::kIdle) publish_.reset();  // incomplete: the server will find it idle
  drop();
}

void SimPublisher::deliver(Connection& connection, std::span<const std::byte> bytes) {
  while (!bytes.empty() && connection_ == &connection) {
    const auto space = parser_->receive_space();
    const std::size_t n = std::min(space.size(), bytes.size());
    std::memcpy(space.data(), bytes.data(), n);
    parser_->received(n);
    bytes = bytes.subspan(n);
    while (connection_ == &connection) {
      const auto event = parser_->next();
      if (event.ok() && *event == FrameParser::Event::kNeedBytes) break;
      if (!event.ok() || (*event == FrameParser::Event::kHead && parser_->header().body_size > 0)) {
        world_.cut(connection);
        lost(connection);
        break;
      }
      if (*event == FrameParser::Event::kEnd) answer();
    }
  }
}

void SimPublisher::answer() {
  const auto type = static_cast<FrameType>(parser_->header().type);
  const auto meta = parser_->meta();
  if (const auto it = pending_.find(parser_->header().request); it != pending_.end()) {
    const Change change = it->second;
    pending_.erase(it);
    world_.trace("publisher ", number_, ": ", frame_type_name(change.type), " of ", change.what.name, " answered ", frame_type_name(type));
    changed(change, type);
    if (pending_.empty() && state_ == State::kChanges) conclude();
    return;
  }
  if (parser_->header().request != request_) return;
  world_.trace("publisher ", number_, ": answered ", frame_type_name(type));
  switch (state_) {
    case State::kWelcome: {
      const auto welcome = WelcomeMessage::decode(meta);
      state_ = State::kIdle;
      if (type != FrameType::kWelcome || !welcome.ok()) return;
      server_ = welcome->incarnation;
      newest_ = welcome->newest;
      return;
    }
    case State::kStart: {
      state_ = State::kIdle;
      const auto started = PublishIdMessage::decode(meta);
      if (type != FrameType::kPublishId || !started.ok()) {
        newest_.reset();
        if (const auto error = ErrorMessage::decode(meta); error.ok() && error->code == Code::kStale) world_.coverage().store["publish refused: base"]++;
        if (world_.random().chance(50)) {  // learn the newest from a new WELCOME
          world_.cut(*connection_);
          drop();
        }
        return;
      }
      publish_ = started->publish;
      publish_server_ = *server_;
      repeats_ = 0;
      return send_changes();
    }
    case State::kFinish: {
      state_ = State::kIdle;
      const auto published = PublishedMessage::decode(meta);
      if (type == FrameType::kPublished && published.ok()) {
        world_.checker().published(*server_, *publish_, published->version);
        newest_ = published->version;
        if (repeats_ > 1) world_.coverage().store["finish repeated"]++;
      }
      publish_.reset();
      return;
    }
    case State::kAbort:
      world_.coverage().store["publish aborted"]++;
      state_ = State::kIdle;
      publish_.reset();
      return;
    default: return;
  }
}

void SimPublisher::put(const World::Tensor& tensor) {
  Change change;
  change.block = block_id(tensor.name, tensor.shard);
  change.what.key = world_.next_key();
  change.what.size = tensor.size;
  change.what.name = tensor.name;
  Bytes bytes(static_cast<std::size_t>(tensor.size));
  content(change.what.key, 0, bytes);
  change.crc = crc64(bytes);
  PutMessage message;
  message.publish = *publish_;
  message.tensor = tensor.name;
  message.shape = tensor.shape;
  message.shard = tensor.shard;
  pending_[++request_] = change;
  send(message.encode(request_, tensor.size));
  send(bytes);
}

void SimPublisher::send_changes() {
  Random& random = world_.random();
  state_ = State::kChanges;
  refused_ = false;
  const auto& tensors = world_.tensors();
  if (random.chance(12)) {  // the last tensor comes and goes
    Change change;
    change.type = FrameType::kRemove;
    change.block = block_id(tensors.back().name, tensors.back().shard);
    pending_[++request_] = change;
    send(NameMessage{*publish_, tensors.back().name, ""}.encode(FrameType::kRemove, request_));
  }
  const bool all = !newest_ || random.chance(10);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const bool large = tensors[i].size > kExtentBytes;
    if (all || random.chance(large ? 15 : 30)) put(tensors[i]);
  }
  if (random.chance(10) || all) {
    put(tensors[0]);  // twice: the second counts
    Change change;
    change.type = FrameType::kAlias;
    change.block = block_id("tied", Shard::whole());
    change.what.alias = true;
    change.what.name = "tied";
    pending_[++request_] = change;
    send(NameMessage{*publish_, "tied", tensors[0].name}.encode(FrameType::kAlias, request_));
  }
  if (pending_.empty()) put(tensors[0]);
  if (random.chance(4)) {  // dies, or stops, in the middle of what it sent
    world_.coverage().faults["publisher gone mid-put"]++;
    publish_.reset();
    world_.cut(*connection_);
    drop();
  }
}

void SimPublisher::changed(const Change& change, FrameType type) {
  Checker::Intent& intent = world_.checker().intent(*publish_);
  if (change.type == FrameType::kPut && type == FrameType::kPutDone) {
    const auto done = PutDoneMessage::decode(parser_->meta());
    if (!done.ok() || done->crc64 != change.crc) {
      world_.coverage().store["put came out altered"]++;
      refused_ = true;
      return;
    }
    intent.put[change.block] = change.what;
  } else if (change.type == FrameType::kRemove && type == FrameType::kOk) {
    intent.removed[change.block] = true;
    world_.coverage().store["tensor removed"]++;
  } else if (change.type == FrameType::kAlias && type == FrameType::kOk) {
    intent.put[change.block] = change.what;
    world_.coverage().store["alias made"]++;
  } else if (change.type != FrameType::kRemove) {
    refused_ = true;  // no room, or the publish is gone
    world_.coverage().store["put refused"]++;
  }
}

// Everything was answered: finish, abort, or fall silent for a while.
void SimPublisher::conclude() {
  Random& random = world_.random();
  if (refused_ || random.chance(6)) {
    state_ = State::kAbort;
    send(PublishIdMessage{*publish_, {}}.encode(FrameType::kAbort, ++request_));
    return;
  }
  if (random.chance(8)) {
    state_ = State::kIdle;
    world_.coverage().faults["publisher falls silent"]++;
    later(static_cast<Micros>(random.below(20'000)), [] {});
    frozen_until_ = world_.now() + static_cast<Micros>(random.below(15'000));
    return;
  }
  finish();
}

void SimPublisher::finish() {
  if (++repeats_ > 3 || publish_server_ != server_) {
    publish_.reset();
    return;
  }
  state_ = State::kFinish;
  send(PublishIdMessage{*publish_, {}}.encode(FrameType::kFinish, ++request_));
  if (world_.random().chance(10)) {  // the reply is lost
    const std::uint64_t id = connection_->id;
    later(static_cast<Micros>(world_.random().below(400)), [this, id] {
      if (connection_ == nullptr || connection_->id != id || state_ != State::kFinish) return;
      Connection& connection = *connection_;
      world_.cut(connection);
      lost(connection);
    });
  }
}

// ---------------------------------------------------------------- inside the server

void LocalPublisher::start() {
  world_.after(static_cast<Micros>(500 + world_.random().below(5000)), Lane::kPassive, [this] { act(); });
}

void LocalPublisher::act() {
  if (world_.stopping()) return;
  slot_.reset();  // of a server that died meanwhile
  server_ = world_.server();
  if (gone() || world_.now() < server_->frozen_until()) return start();
  publish_ = {world_.random().next(), world_.random().next()};
  if (!server_->store().publish_start(publish_, true, std::nullopt, world_.now()).ok()) return start();
  puts_left_ = 1 + static_cast<std::uint32_t>(world_.random().below(2));
  write(0);
}

void LocalPublisher::write(std::size_t from) {
  if (gone()) return start();
  if (world_.now() < server_->frozen_until()) {
    world_.after(server_->frozen_until() - world_.now() + 1, Lane::kPassive, [this, from] { write(from); });
    return;
  }
  Random& random = world_.random();
  if (!slot_) {
    tensor_ = &world_.tensors()[static_cast<std::size_t>(random.below(world_.tensors().size()))];
    auto slot = server_->store().put_begin(publish_, BlockSpec{tensor_->name, DType::kU8, tensor_->shape, tensor_->shard}, world_.now());
    if (!slot.ok()) {
      server_->store().abort(publish_);
      return start();
    }
    slot_ = *slot;
    key_ = world_.next_key();
    source_.resize(static_cast<std::size_t>(tensor_->size));
    content(key_, 0, source_);
  }
  // A few lines at a time, more of a large block.
  const std::size_t n = std::min(source_.size() - from, 64 * static_cast<std::size_t>(1 + random.below(4 + source_.size() / 512)));
  std::memcpy(slot_->payload.data() + from, source_.data() + from, n);
  server_->store().put_progress(publish_, world_.now());
  const std::size_t done = from + n;
  world_.after(static_cast<Micros>(10 + random.below(150)), Lane::kPassive, [this, done] {
    if (done < source_.size()) return write(done);
    seal();
  });
}

void LocalPublisher::seal() {
  const std::optional<PutSlot> slot = std::exchange(slot_, std::nullopt);
  if (gone()) return start();
  std::vector<std::uint32_t> extents;
  const std::span<const std::byte> source(source_);
  for (std::size_t at = 0; at < source.size(); at += kExtentBytes) extents.push_back(crc32c(source.subspan(at, std::min<std::size_t>(kExtentBytes, source.size() - at))));
  if (!server_->store().put_seal(publish_, *slot, crc64(source_), extents, world_.now()).ok()) return start();
  Checker::Block block;
  block.key = key_;
  block.size = tensor_->size;
  block.name = tensor_->name;
  world_.checker().intent(publish_).put[slot->block] = block;
  if (--puts_left_ > 0) return write(0);
  finish();
}

void LocalPublisher::finish() {
  world_.checker().finishing(publish_);
  const auto version = server_->handlers().finish(publish_, world_.now());
  if (version.ok()) world_.checker().published(server_->incarnation(), publish_, *version);
  if (server_->handlers().take_published()) server_->published();
  start();
}

}  // namespace paramwire::sim
