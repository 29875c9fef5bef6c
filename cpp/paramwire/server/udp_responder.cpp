#include "paramwire/server/udp_responder.hpp"

#include "paramwire/base/bytes.hpp"

#include <cstring>
#include <memory>
#include <utility>

namespace paramwire {

Result<std::unique_ptr<UdpResponder>> UdpResponder::create(const Incarnation& incarnation, std::function<Result<std::uint64_t>()> random,
                                                           const OmittedResponderChecks& omitted) {
  PARAMWIRE_TRY(k0, random());
  PARAMWIRE_TRY(k1, random());
  return std::unique_ptr<UdpResponder>(new UdpResponder(incarnation, SipKey{k0, k1}, std::move(random), omitted));
}

Result<UdpKeyMessage> UdpResponder::open(std::uint16_t port, const std::optional<SipKey>& exported) {
  UdpKeyMessage out;
  out.port = port;
  out.segment_max = static_cast<std::uint16_t>(kSegmentBytesMax);
  const std::lock_guard lock(mutex_);
  do {
    PARAMWIRE_TRY(number, random_());
    out.session = number;
  } while (out.session == 0 || sessions_.count(out.session) > 0);
  Session session;
  if (exported) {
    session.key = *exported;
  } else {
    PARAMWIRE_TRY(k0, random_());
    PARAMWIRE_TRY(k1, random_());
    session.key = out.key = {k0, k1};
  }
  sessions_.emplace(out.session, session);
  return out;
}

void UdpResponder::close(std::uint64_t session) noexcept {
  const std::lock_guard lock(mutex_);
  sessions_.erase(session);
}

bool UdpResponder::disable_gso(std::uint64_t session) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(session);
  return found != sessions_.end() && std::exchange(found->second.gso, false);
}

// Marks `sequence` as seen. False: it was, or it is too old to tell. A ring of bits by number, as in RFC 6479.
bool UdpResponder::fresh(Session& session, std::uint64_t sequence) noexcept {
  const auto word = [&](std::uint64_t number) -> std::uint64_t& { return session.seen[number % kReplayWindow / 64]; };
  const auto bit = [](std::uint64_t number) { return std::uint64_t{1} << (number % 64); };
  if (sequence == 0) return false;
  if (sequence > session.highest) {
    if (sequence - session.highest >= kReplayWindow) {
      session.seen.fill(0);
    } else {
      for (std::uint64_t n = session.highest + 1; n <= sequence; ++n) word(n) &= ~bit(n);
    }
    session.highest = sequence;
  } else if (session.highest - sequence >= kReplayWindow || (word(sequence) & bit(sequence)) != 0) {
    return false;
  }
  word(sequence) |= bit(sequence);
  return true;
}

SipTag UdpResponder::token(std::span<const std::byte, 18> sender, std::uint64_t session) const noexcept {
  std::array<std::byte, 26> bound;
  std::memcpy(bound.data(), sender.data(), 18);
  store_le<std::uint64_t>(bound.data() + 18, session);
  SipTag out = siphash128(secret_, bound);
  if (out == SipTag{}) out.low = 1;  // zeros say "none"
  return out;
}

UdpResponder::Verdict UdpResponder::check(std::span<const std::byte> datagram, std::span<const std::byte, 18> sender, Question& question) {
  received_.fetch_add(1, std::memory_order_relaxed);
  const auto silence = [](std::atomic<std::uint64_t>& counter) {
    counter.fetch_add(1, std::memory_order_relaxed);
    return Verdict::kSilence;
  };
  const auto session = get_session(datagram);
  if (!session || decode_get(datagram, question.get) != nullptr) return silence(malformed_);
  {
    const std::lock_guard lock(mutex_);
    const auto found = sessions_.find(*session);
    if (found == sessions_.end()) return silence(malformed_);
    if (!omitted_.mac && !get_authentic(datagram, found->second.key)) return silence(unauthentic_);
    if (!omitted_.replay && !fresh(found->second, question.get.sequence)) return silence(replayed_);
    question.key = found->second.key;
    question.gso = found->second.gso;
  }
  question.token = token(sender, *session);
  if (!omitted_.incarnation && question.get.asked.incarnation != incarnation_) {
    question.status = refuse(question, StatusCode::kStale);
    return Verdict::kStatus;
  }
  if (!omitted_.token && question.get.token != question.token) {
    tokens_.fetch_add(1, std::memory_order_relaxed);
    question.status = DatagramStatus{StatusCode::kToken, question.get.request, 0, question.token}.encode(question.key);
    return Verdict::kStatus;
  }
  answered_.fetch_add(1, std::memory_order_relaxed);
  return Verdict::kLookup;
}

std::array<std::byte, kStatusBytes> UdpResponder::refuse(const Question& question, StatusCode code, std::uint32_t retry_us) noexcept {
  refused_.fetch_add(1, std::memory_order_relaxed);
  return DatagramStatus{code, question.get.request, retry_us, question.token}.encode(question.key);
}

ResponderStats UdpResponder::stats() const noexcept {
  ResponderStats out{received_, malformed_, unauthentic_, replayed_, answered_, tokens_, refused_, 0};
  const std::lock_guard lock(mutex_);
  out.sessions = sessions_.size();
  return out;
}

// ---------------------------------------------------------------- segments

SegmentWalk::SegmentWalk(const DatagramGet& get, std::span<const std::byte> part, bool ignore_bitmap) noexcept
    : get_(get), part_(part), crc_(get.asked), ignore_bitmap_(ignore_bitmap) {
  const std::uint64_t last = std::uint64_t{get.first_segment} + get.segment_count - 1;
  fits_ = last * get.segment_size < part.size();
}

std::optional<std::span<const std::byte>> SegmentWalk::next(std::byte* header) noexcept {
  while (at_ < get_.segment_count && !get_.wanted(at_) && !ignore_bitmap_) ++at_;
  if (!fits_ || at_ >= get_.segment_count) return std::nullopt;
  const std::uint32_t segment = get_.first_segment + at_++;
  const auto begin = static_cast<std::size_t>(std::uint64_t{segment} * get_.segment_size);
  const auto payload = part_.subspan(begin, std::min<std::size_t>(get_.segment_size, part_.size() - begin));
  encode_data_header(header, {static_cast<std::uint16_t>(payload.size()), get_.request, segment}, crc_);
  return payload;
}

}  // namespace paramwire
