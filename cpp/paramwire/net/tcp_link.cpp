#include "paramwire/net/tcp_link.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/net/block_read.hpp"

#include <algorithm>
#include <poll.h>

namespace paramwire {

namespace {

// Blocks asked for and not answered. By count: 256 tiny ones hide a round trip of 100 us at 2.5 million a second; by bytes: what
// the server holds for us while we are slow. At least one is always under way.
constexpr std::size_t kFlightsMax = 256;
constexpr std::uint64_t kFlightBytesMax = std::uint64_t{32} << 20;

}  // namespace

Result<std::unique_ptr<Link>> TcpLink::connect(const Endpoint& endpoint, const Caller& caller, const Incarnation& incarnation,
                                               const OmittedReadChecks& omitted, Micros deadline) {
  PARAMWIRE_TRY(greeted, connect_and_greet(endpoint, caller, deadline));
  if (greeted.facts.incarnation != incarnation && !omitted.epoch) {
    return Error(Code::kStale, cat(endpoint, " is incarnation ", greeted.facts.incarnation, " now, ", incarnation, " was expected (the server restarted): take a new snapshot"));
  }
  greeted.facts.incarnation = incarnation;
  return std::unique_ptr<Link>(new TcpLink(std::move(greeted), omitted));
}

void TcpLink::read(std::span<BlockRead> batch, Micros deadline) {
  for (BlockRead& item : batch) item.result = Error(Code::kInternal, "not reached");
  Status status = guard_.check(cat("tcp link to ", socket_.peer()));
  if (status.ok() && broken()) status = Error(Code::kUnreachable, cat(socket_.peer(), ": this link was broken before: ", broken_by_, "; connect again"));
  if (!status.ok()) {
    for (BlockRead& item : batch) item.result = status;
    return;
  }
  flights_.clear();
  flight_bytes_ = 0;
  next_ = 0;
  status = run(batch, deadline);
  if (status.ok()) return;

  // Nobody writes into the targets from here on: what is under way is never received.
  broken_by_ = status.error().to_string();
  broken_.store(true, std::memory_order_release);
  if (!guard_.in_child()) socket_.shutdown();  // which is for all who share it
  for (const Flight& flight : flights_) flight.item->result = status;
  for (BlockRead& item : batch.subspan(next_)) item.result = status;
  flights_.clear();
}

Status TcpLink::run(std::span<BlockRead> batch, Micros deadline) {
  for (;;) {
    fill_window(batch);
    if (flights_.empty() && next_ == batch.size()) return {};
    PARAMWIRE_CHECK(send_questions());
    PARAMWIRE_TRY(moved, receive_answers());
    if (moved) {
      // Checked here too: a peer that always has bytes for us must not carry us past the deadline.
      if (steady_clock().now() < deadline) continue;
      return Error(Code::kTimeout, cat(socket_.peer(), ": the deadline passed with ", flights_.size() + (batch.size() - next_), " of ", batch.size(), " blocks to come"));
    }
    const bool unsent = questions_sent_ < questions_.size();
    PARAMWIRE_CHECK(socket_.wait(static_cast<short>(unsent ? POLLIN | POLLOUT : POLLIN), deadline));
  }
}

// Tops up when half of the window is free, so that questions about tiny blocks share a send.
void TcpLink::fill_window(std::span<BlockRead> batch) {
  if (flights_.size() > kFlightsMax / 2) return;
  while (next_ < batch.size() && flights_.size() < kFlightsMax) {
    BlockRead& item = batch[next_];
    if (!flights_.empty() && flight_bytes_ + item.range.size > kFlightBytesMax) return;
    ++next_;
    ++stats_.reads;
    item.result = check_read(item);
    if (!item.result.ok()) continue;
    StreamRead read(item, incarnation_, omitted_);
    const std::uint64_t request = ++last_request_;
    auto question = read.start(request);
    if (!question.ok()) {
      item.result = std::move(question).error();
      continue;
    }
    questions_.insert(questions_.end(), question->begin(), question->end());
    flight_bytes_ += item.range.size;
    flights_.push_back(Flight{&item, std::move(read), request});
  }
}

Status TcpLink::send_questions() {
  while (questions_sent_ < questions_.size()) {
    const iovec part{questions_.data() + questions_sent_, questions_.size() - questions_sent_};
    PARAMWIRE_TRY(sent, socket_.try_send({&part, 1}));
    if (!sent) return {};
    questions_sent_ += *sent;
  }
  questions_.clear();
  questions_sent_ = 0;
  return {};
}

// One receive's worth. False: nothing was there.
Result<bool> TcpLink::receive_answers() {
  const auto space = parser_.receive_space();
  PARAMWIRE_TRY(n, socket_.try_receive(space));
  if (!n) return false;
  parser_.received(*n);
  fresh_ = true;
  PARAMWIRE_CHECK(parse());
  return true;
}

Status TcpLink::parse() {
  while (fresh_) {
    auto event = parser_.next();
    if (!event.ok()) return Error(event.error().code(), cat(socket_.peer(), ": ", event.error().message()));
    if (*event == FrameParser::Event::kNeedBytes) {
      fresh_ = false;
    } else if (Status status = on_event(*event); !status.ok()) {
      return Error(status.error().code(), cat(socket_.peer(), ": ", status.error().message()));
    }
  }
  return {};
}

Status TcpLink::on_event(FrameParser::Event event) {
  if (event == FrameParser::Event::kBody) {
    flights_.front().read.on_body(parser_.body_part());
    return {};
  }
  if (event == FrameParser::Event::kEnd) {
    land(flights_.front());
    flights_.pop_front();
    return {};
  }
  const FrameHeader& header = parser_.header();
  if (flights_.empty() || header.request != flights_.front().request) {
    if (static_cast<FrameType>(header.type) == FrameType::kError && header.request == 0) {  // about the stream, not one question
      PARAMWIRE_TRY(message, ErrorMessage::decode(parser_.meta()));
      return Error(message.code, std::string(message.text));
    }
    return Error(Code::kCorrupt, cat("an answer to request ", header.request, " that was not asked next"));
  }
  PARAMWIRE_TRY(target, flights_.front().read.on_head(header, parser_.meta()));
  if (header.body_size > 0) parser_.set_body(target);
  return {};
}

void TcpLink::land(Flight& flight) {
  BlockRead& item = *flight.item;
  item.result = flight.read.finish();
  flight_bytes_ -= item.range.size;
  stats_.wire_bytes += flight.read.wire_bytes();
  count_read(stats_, item, omitted_);
}

Result<BlockView> TcpLink::view(const ManifestEntry& entry, const Locator&, ByteRange) {
  return Error(Code::kUnavailable, cat("block ", entry.to_string(), ": tcp has no views, the bytes are on ", socket_.peer(), ": fetch into a buffer, or use shm on the server's host"));
}

}  // namespace paramwire
