// What the fake network cards do: work requests in, bytes moved, completions out. Source: InfiniBand specification 1.4, chapter 9 (transport) and 10.7
// to 10.10 (work requests, completions, errors).
#include "support/fake_verbs_objects.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cerrno>
#include <unistd.h>

namespace paramwire::testing {

namespace {

constexpr std::size_t kLine = 64;
// Lines that one poll delivers at most, or this part of those under way where that is more: a small READ takes a few polls, a large one no million.
constexpr std::size_t kLinesAPoll = 16, kPollsAPool = 16;

// Uniform in [0, bound) from 32 random bits. Source: Lemire, "Fast random integer generation in an interval", 2019; the bias is below 1 in 2^32 / bound.
std::size_t scale(std::uint32_t bits, std::size_t bound) { return static_cast<std::size_t>((std::uint64_t{bits} * bound) >> 32); }

bool covers(const ibv_mr& mr, std::uint64_t address, std::uint64_t size) {
  const auto begin = reinterpret_cast<std::uintptr_t>(mr.addr);
  return address >= begin && size <= mr.length && address - begin <= mr.length - size;
}

void raise_event(int fd) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(fd, &one, sizeof one);  // fails only at 2^64 - 2 events not taken
}

}  // namespace

struct FakeVerbs::Verdict {
  ibv_wc_status status = IBV_WC_SUCCESS;
  const Mr* remote = nullptr;
  Qp* responder = nullptr;
  bool breaks_responder = false;  // it answers with a NAK that ends it too
};

// ---------------------------------------------------------------- in

int FakeVerbs::post_send(ibv_qp* raw, ibv_send_wr* first, ibv_send_wr** bad) {
  Lock lock(mutex_);
  *bad = first;
  Qp* const qp = own(qps_, raw, "queue pair");
  if (qp == nullptr) return EINVAL;
  if (const int error = usable(FakeCall::kPostSend, qp->device())) return error;
  int error = 0;
  std::uint64_t count = 0;
  for (ibv_send_wr* wr = first; wr != nullptr && error == 0; wr = wr->next) {
    error = enqueue(*qp, *wr);
    if (error != 0) *bad = wr;
    else ++count;
  }
  totals_.doorbells += count > 0 ? 1 : 0;
  totals_.work_requests += count;
  totals_.doorbell_largest = std::max(totals_.doorbell_largest, count);
  start(lock, *qp);
  return error;
}

int FakeVerbs::enqueue(Qp& qp, const ibv_send_wr& wr) {
  if (wr.opcode != IBV_WR_RDMA_READ) {
    breach(cat("a work request with opcode ", static_cast<int>(wr.opcode), ": only RDMA READ (", static_cast<int>(IBV_WR_RDMA_READ), ") is part of the protocol"));
    return EINVAL;
  }
  const char* reason = nullptr;
  if (qp.state != IBV_QPS_RTS && qp.state != IBV_QPS_ERR) reason = "a READ on a queue pair that is not in RTS";
  if (wr.num_sge < 0 || static_cast<std::uint32_t>(wr.num_sge) > qp.sges_max) reason = "a READ into more pieces than the queue pair was made for";
  if ((wr.send_flags & IBV_SEND_INLINE) != 0) reason = "a READ with IBV_SEND_INLINE";
  if (reason != nullptr) {
    refuse(reason);
    return EINVAL;
  }
  if (qp.posted - qp.freed == qp.ring.size()) {
    refuse(cat("a send queue of ", qp.ring.size(), " is full: an unsignalled work request keeps its place until a later completion is polled"));
    return ENOMEM;
  }
  WorkRequest& kept = qp.at(qp.posted);
  kept = {};
  kept.id = wr.wr_id;
  kept.remote_address = wr.wr.rdma.remote_addr;
  kept.rkey = wr.wr.rdma.rkey;
  kept.sge_count = static_cast<std::uint32_t>(wr.num_sge);
  kept.signalled = qp.signal_all || (wr.send_flags & IBV_SEND_SIGNALED) != 0;
  kept.fenced = (wr.send_flags & IBV_SEND_FENCE) != 0;
  ibv_sge* const sges = qp.sges.data() + qp.posted % qp.ring.size() * qp.sges_max;
  for (std::uint32_t i = 0; i < kept.sge_count; ++i) {
    sges[i] = wr.sg_list[i];
    kept.size += sges[i].length;
  }
  ++qp.posted;
  if (qp.state == IBV_QPS_ERR) {
    qp.started = qp.posted;
    complete(qp, kept, IBV_WC_WR_FLUSH_ERR);
  }
  return 0;
}

void FakeVerbs::start(Lock& lock, Qp& qp) {
  if (delivery_ == Delivery::kThread) {
    changed_.notify_all();
  } else {
    pump(lock, qp);
  }
}

// After a change of the fabric: what waits is tried again.
void FakeVerbs::start_all(Lock& lock) {
  std::vector<std::uint32_t> numbers;
  for (const auto& [number, qp] : by_number_) {
    qp->stalled = false;
    if (may_start(*qp)) numbers.push_back(number);
  }
  std::sort(numbers.begin(), numbers.end());  // a hash table's order is no order to reproduce
  for (const std::uint32_t number : numbers) {
    const auto found = by_number_.find(number);  // the lock may have been free in between
    if (found != by_number_.end()) start(lock, *found->second);
  }
}

bool FakeVerbs::may_start(const Qp& qp) const {
  if (qp.started == qp.posted || qp.state != IBV_QPS_RTS || frozen_ || qp.stalled) return false;
  if (qp.started == qp.completed) return true;
  return qp.started - qp.completed < qp.reads_as_requester && !qp.ring[qp.started % qp.ring.size()].fenced;
}

// Carries out what may start; by lines, puts it under way.
void FakeVerbs::pump(Lock& lock, Qp& qp) {
  if (qp.pumped) return;  // another thread is at it and sees what was queued
  qp.pumped = true;
  while (may_start(qp)) {
    WorkRequest& wr = qp.at(qp.started);
    if (!wr.numbered && before_read_) {
      wr.numbered = true;
      wr.number = ++totals_.reads;
      const FakeRead read{wr.number, qp.device().config.name, qp.qp_num, wr.remote_address, wr.size};
      const auto hook = before_read_;
      lock.unlock();
      hook(read);
      lock.lock();
      continue;
    }
    qp.stalled = !start_one(qp);
    finish(qp);
  }
  qp.pumped = false;
  changed_.notify_all();
}

void FakeVerbs::run_nic() {
  Lock lock(mutex_);
  while (!stopping_) {
    const auto ready = std::find_if(qps_.begin(), qps_.end(), [&](const auto& each) { return may_start(*each.second) && !each.second->pumped; });
    if (ready == qps_.end()) {
      changed_.wait(lock);
    } else {
      pump(lock, *ready->second);
    }
  }
}

// ---------------------------------------------------------------- one READ

const FakeVerbs::Mr* FakeVerbs::region(std::uint32_t key, bool remote) const {
  const std::uint32_t index = key / 2 - kKeyFirst;  // wraps to a large one below the first
  if ((key % 2 == 1) != remote || index >= by_key_.size()) return nullptr;
  const Mr* const mr = by_key_[index];
  return mr != nullptr && !mr->revoked ? mr : nullptr;
}

bool FakeVerbs::local_memory_fits(const Qp& qp, const WorkRequest& wr) const {
  const ibv_sge* const sges = qp.sges_of(wr);
  for (std::uint32_t i = 0; i < wr.sge_count; ++i) {
    if (sges[i].length == 0) continue;
    const Mr* const mr = region(sges[i].lkey, false);
    if (mr == nullptr || mr->owner != qp.domain || (mr->access & IBV_ACCESS_LOCAL_WRITE) == 0 || !covers(*mr, sges[i].addr, sges[i].length)) return false;
  }
  return true;
}

FakeVerbs::Verdict FakeVerbs::judge(const Qp& qp, const WorkRequest& wr) const {
  Verdict out;
  const auto refused = [&](ibv_wc_status status) {
    out.status = status;
    return out;
  };
  const FakePort* const port = port_of(qp.device().config, qp.port);
  if (port != nullptr && wr.size > port->message_max) return refused(IBV_WC_LOC_LEN_ERR);
  if (qp.reads_as_requester == 0) return refused(IBV_WC_LOC_QP_OP_ERR);
  if (!local_memory_fits(qp, wr)) return refused(IBV_WC_LOC_PROT_ERR);
  Qp* const peer = responder_of(qp);
  if (peer == nullptr) return refused(IBV_WC_RETRY_EXC_ERR);
  const FakePort& there = *port_of(peer->device().config, peer->port);
  // Packets of one size are expected and packets of another come, or do not pass at all. A READ of one packet has the size that it has.
  const auto [least, most] = std::minmax({qp.mtu, peer->mtu});
  const std::uint32_t passes = std::min({least, port->mtu_active, there.mtu_active});
  if (wr.size > passes && most != passes) return refused(IBV_WC_RETRY_EXC_ERR);
  if (wr.size == 0) return out;  // asks for nothing, so neither key nor address is looked at
  out.responder = peer;
  out.breaks_responder = true;
  if ((peer->access & IBV_ACCESS_REMOTE_READ) == 0 || qp.reads_as_requester > peer->reads_as_responder) return refused(IBV_WC_REM_INV_REQ_ERR);
  const Mr* const mr = region(wr.rkey, true);
  if (mr == nullptr || mr->owner != peer->domain || (mr->access & IBV_ACCESS_REMOTE_READ) == 0 || !covers(*mr, wr.remote_address, wr.size)) return refused(IBV_WC_REM_ACCESS_ERR);
  out.breaks_responder = false;
  out.remote = mr;
  return out;
}

// returns: false when there is no answer and the time to give up has not come
bool FakeVerbs::start_one(Qp& qp) {
  WorkRequest& wr = qp.at(qp.started);
  if (!wr.numbered) {
    wr.numbered = true;
    wr.number = ++totals_.reads;
  }
  const Verdict verdict = judge(qp, wr);
  if (verdict.status == IBV_WC_RETRY_EXC_ERR && timeouts_held_) return false;
  wr.status = verdict.status;
  wr.remote = verdict.remote;
  wr.responder = verdict.responder;
  wr.breaks_responder = verdict.breaks_responder;
  wr.bytes_moved = verdict.status == IBV_WC_SUCCESS ? wr.size : 0;
  for (auto fault = read_faults_.begin(); fault != read_faults_.end();) {
    if (--fault->nth > 0) {
      ++fault;
      continue;
    }
    wr.fault = fault->fault;
    fault = read_faults_.erase(fault);
    if (wr.status != IBV_WC_SUCCESS || wr.fault.status == IBV_WC_SUCCESS) continue;
    wr.status = wr.fault.status;
    wr.bytes_moved = std::min(wr.size, wr.fault.bytes_moved);
  }
  const auto slot = static_cast<std::uint32_t>(qp.started % qp.ring.size());
  ++qp.started;
  totals_.read_bytes += wr.bytes_moved;
  if (delivery_ == Delivery::kLines) spread_lines(qp, wr, slot);
  else copy_all(qp, wr);
  return true;
}

// By the path that the library's own readers use: under ThreadSanitizer it reads atomic words, since a writer may be rewriting them.
void FakeVerbs::copy_all(const Qp& qp, WorkRequest& wr) {
  const auto* source = reinterpret_cast<const std::byte*>(wr.remote_address);
  std::uint64_t left = wr.bytes_moved;
  for (const ibv_sge* sge = qp.sges_of(wr); left > 0; ++sge) {
    const std::uint64_t size = std::min<std::uint64_t>(left, sge->length);
    static_cast<void>(copy_crc64(reinterpret_cast<std::byte*>(sge->addr), source, size));
    source += size;
    left -= size;
  }
}

void FakeVerbs::spread_lines(Qp& qp, WorkRequest& wr, std::uint32_t slot) {
  std::uint64_t source = wr.remote_address, left = wr.bytes_moved;
  for (const ibv_sge* sge = qp.sges_of(wr); left > 0; ++sge) {
    std::uint64_t target = sge->addr, piece_left = std::min<std::uint64_t>(left, sge->length);
    left -= piece_left;
    while (piece_left > 0) {
      const std::uint64_t size = std::min<std::uint64_t>(piece_left, kLine - source % kLine);
      lines_.push_back({reinterpret_cast<const std::byte*>(source), reinterpret_cast<std::byte*>(target), &qp, slot, static_cast<std::uint32_t>(size)});
      ++wr.lines_left;
      source += size;
      target += size;
      piece_left -= size;
    }
  }
}

void FakeVerbs::deliver_lines() {
  if (frozen_ || lines_.empty()) return;
  std::size_t steps = 1 + scale(static_cast<std::uint32_t>(random_.next() >> 32), std::max(kLinesAPoll, lines_.size() / kPollsAPool));
  while (steps-- > 0 && !lines_.empty()) {
    if (on_line_) on_line_();
    const std::size_t index = scale(static_cast<std::uint32_t>(random_.next() >> 32), lines_.size());
    const Line line = lines_[index];
    lines_[index] = lines_.back();
    lines_.pop_back();
    if (line.size == kLine) std::memcpy(line.target, line.source, kLine);  // of a size that the compiler knows
    else std::memcpy(line.target, line.source, line.size);
    if (--line.qp->ring[line.slot].lines_left > 0) continue;
    finish(*line.qp);
    while (may_start(*line.qp)) {
      line.qp->stalled = !start_one(*line.qp);
      finish(*line.qp);
    }
  }
}

// ---------------------------------------------------------------- out

// Completes what is whole, in order; the first failure ends the queue pair.
void FakeVerbs::finish(Qp& qp) {
  while (qp.completed < qp.started) {
    WorkRequest& wr = qp.at(qp.completed);
    if (wr.lines_left > 0) return;
    if (wr.status == IBV_WC_SUCCESS) {
      std::uint64_t at = wr.fault.flip_at;
      for (const ibv_sge* sge = qp.sges_of(wr); wr.fault.flip_at < wr.size; at -= sge->length, ++sge) {
        if (at >= sge->length) continue;
        *reinterpret_cast<unsigned char*>(sge->addr + at) ^= 1;
        break;
      }
      complete(qp, wr, IBV_WC_SUCCESS);
      continue;
    }
    Qp* const responder = wr.breaks_responder ? wr.responder : nullptr;
    complete(qp, wr, wr.status);
    enter_error(qp);
    if (responder != nullptr) enter_error(*responder);
    return;
  }
}

void FakeVerbs::complete(Qp& qp, WorkRequest& wr, ibv_wc_status status) {
  const std::uint64_t sequence = qp.completed++;
  if (status == IBV_WC_SUCCESS && !wr.signalled) return;
  Cq& cq = *qp.send;
  if (cq.count == cq.ring.size()) return breach(cat("a completion queue of ", cq.ring.size(), " entries overran: a completion is lost"));
  std::size_t slot = cq.first + cq.count++;
  if (slot >= cq.ring.size()) slot -= cq.ring.size();
  Cq::Entry& entry = cq.ring[slot];
  entry = {};
  entry.wc.wr_id = wr.id;
  entry.wc.status = status;
  entry.wc.qp_num = qp.qp_num;
  if (status == IBV_WC_SUCCESS) {  // nothing else is defined of a failed one (ibv_poll_cq(3))
    entry.wc.opcode = IBV_WC_RDMA_READ;
    entry.wc.byte_len = static_cast<std::uint32_t>(wr.size);
  } else {
    entry.wc.opcode = IBV_WC_BIND_MW;
    entry.wc.byte_len = 0xdeadbeef;
  }
  entry.qp = &qp;
  entry.sequence = sequence;
  ++totals_.completions;
  if (!cq.armed) return;
  cq.armed = false;
  raise_event(cq.channel->fd);
}

void FakeVerbs::enter_error(Qp& qp) {
  if (qp.state == IBV_QPS_ERR) return;
  qp.state = IBV_QPS_ERR;
  drop_lines(qp, nullptr);
  qp.started = qp.posted;
  while (qp.completed < qp.posted) complete(qp, qp.at(qp.completed), IBV_WC_WR_FLUSH_ERR);
  fail_under_way(IBV_WC_RETRY_EXC_ERR, [&](const Qp&, const WorkRequest& wr) { return wr.responder == &qp; });
}

// kLines: of one work request, or of all of the queue pair.
void FakeVerbs::drop_lines(const Qp& qp, const WorkRequest* wr) {
  if (lines_.empty()) return;
  std::erase_if(lines_, [&](const Line& line) { return line.qp == &qp && (wr == nullptr || &qp.ring[line.slot] == wr); });
}

// kLines: READs on their way whose memory or whose other end goes.
void FakeVerbs::fail_under_way(ibv_wc_status status, const std::function<bool(const Qp&, const WorkRequest&)>& affected) {
  if (delivery_ != Delivery::kLines) return;
  for (const auto& [number, qp] : by_number_) {
    for (std::uint64_t i = qp->completed; i < qp->started; ++i) {
      WorkRequest& wr = qp->at(i);
      if (!affected(*qp, wr)) continue;
      wr.breaks_responder = false;
      if (wr.lines_left == 0) continue;  // it has its bytes, or its failure, and waits for its turn
      drop_lines(*qp, &wr);
      wr.lines_left = 0;
      wr.status = status;
    }
    finish(*qp);
  }
}

void FakeVerbs::forget_completions(const Qp& qp, Cq& cq) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < cq.count; ++i) {
    const Cq::Entry entry = cq.ring[(cq.first + i) % cq.ring.size()];
    if (entry.qp != &qp) cq.ring[(cq.first + kept++) % cq.ring.size()] = entry;
  }
  cq.count = kept;
}

bool FakeVerbs::has_unfinished(const Cq& cq) const {
  return std::any_of(by_number_.begin(), by_number_.end(), [&](const auto& each) { return each.second->send == &cq && each.second->completed < each.second->posted; });
}

int FakeVerbs::req_notify_cq(ibv_cq* raw) {
  const Lock lock(mutex_);
  Cq* const cq = own(cqs_, raw, "completion queue");
  if (cq == nullptr || cq->channel == nullptr) return EINVAL;
  if (const int error = usable(FakeCall::kReqNotify, *cq->owner->owner)) return error;
  // By lines nothing moves but by polls, so who goes to sleep here is woken at once, as by an event of what was polled already.
  cq->armed = delivery_ != Delivery::kLines || !has_unfinished(*cq);
  if (!cq->armed) raise_event(cq->channel->fd);
  return 0;
}

int FakeVerbs::take_cq_event(ibv_comp_channel* channel) {
  std::uint64_t events = 0;
  return read(channel->fd, &events, sizeof events) == sizeof events ? 0 : errno;
}

int FakeVerbs::poll_cq(ibv_cq* raw, int count, ibv_wc* out) {
  const Lock lock(mutex_);
  Cq* const cq = own(cqs_, raw, "completion queue");
  if (cq == nullptr) return -EINVAL;
  if (!faults_.empty()) {
    if (const int error = injected(FakeCall::kPollCq, cq->owner->owner->config.name)) return -error;
  }
  if (delivery_ == Delivery::kLines) deliver_lines();
  int taken = 0;
  for (; taken < count && cq->count > 0; ++taken) {
    const Cq::Entry& entry = cq->ring[cq->first];
    out[taken] = entry.wc;
    entry.qp->freed = std::max(entry.qp->freed, entry.sequence + 1);
    if (++cq->first == cq->ring.size()) cq->first = 0;
    --cq->count;
  }
  return taken;
}

}  // namespace paramwire::testing
