// The life of a queue pair: which attributes a transition needs and takes. Source: InfiniBand specification 1.4, table 91 (and, as drivers hold it, the
// table qp_state_table of drivers/infiniband/core/verbs.c in Linux 6.1); ranges from ibv_modify_qp(3).
#include "support/fake_verbs_objects.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cerrno>

namespace paramwire::testing {

namespace {

struct Transition {
  ibv_qp_state from, to;
  int needed, taken;
};

constexpr Transition kTransitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
     IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
    {IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
};

const char* state_name(ibv_qp_state state) {
  switch (state) {
    case IBV_QPS_RESET: return "RESET";
    case IBV_QPS_INIT: return "INIT";
    case IBV_QPS_RTR: return "RTR";
    case IBV_QPS_RTS: return "RTS";
    case IBV_QPS_ERR: return "ERR";
    default: return "a state that is not used here";
  }
}

std::string attribute_names(int mask) {
  constexpr struct {
    int bit;
    const char* name;
  } kNames[] = {
      {IBV_QP_PKEY_INDEX, "IBV_QP_PKEY_INDEX"}, {IBV_QP_PORT, "IBV_QP_PORT"}, {IBV_QP_ACCESS_FLAGS, "IBV_QP_ACCESS_FLAGS"}, {IBV_QP_AV, "IBV_QP_AV"},
      {IBV_QP_PATH_MTU, "IBV_QP_PATH_MTU"}, {IBV_QP_DEST_QPN, "IBV_QP_DEST_QPN"}, {IBV_QP_RQ_PSN, "IBV_QP_RQ_PSN"},
      {IBV_QP_MAX_DEST_RD_ATOMIC, "IBV_QP_MAX_DEST_RD_ATOMIC"}, {IBV_QP_MIN_RNR_TIMER, "IBV_QP_MIN_RNR_TIMER"}, {IBV_QP_TIMEOUT, "IBV_QP_TIMEOUT"},
      {IBV_QP_RETRY_CNT, "IBV_QP_RETRY_CNT"}, {IBV_QP_RNR_RETRY, "IBV_QP_RNR_RETRY"}, {IBV_QP_SQ_PSN, "IBV_QP_SQ_PSN"},
      {IBV_QP_MAX_QP_RD_ATOMIC, "IBV_QP_MAX_QP_RD_ATOMIC"}, {IBV_QP_CUR_STATE, "IBV_QP_CUR_STATE"},
  };
  std::string out;
  for (const auto& known : kNames) {
    if ((mask & known.bit) != 0) out += cat(out.empty() ? "" : ", ", known.name);
    mask &= ~known.bit;
  }
  if (mask != 0) out += cat(out.empty() ? "" : ", ", "bits 0x", hex64(static_cast<std::uint64_t>(mask)));
  return out;
}

constexpr std::uint32_t kTwentyFourBits = 0xffffff;

const FakeGid* gid_at(const FakePort& port, std::uint32_t index) {
  const auto found = std::find_if(port.gids.begin(), port.gids.end(), [&](const FakeGid& gid) { return gid.index == index; });
  return found == port.gids.end() ? nullptr : &*found;
}

bool has_gid(const FakePort& port, const Gid& gid, GidType type) {
  return std::any_of(port.gids.begin(), port.gids.end(), [&](const FakeGid& each) { return each.gid == gid && each.type == type; });
}

std::uint32_t mtu_bytes(ibv_mtu code) { return 128U << static_cast<unsigned>(code); }

}  // namespace

// Why the specification forbids it; empty when it does not.
std::string FakeVerbs::check_transition(const Qp& qp, const ibv_qp_attr& attributes, int mask) const {
  if ((mask & IBV_QP_STATE) == 0) return "a change without IBV_QP_STATE";
  const ibv_qp_state to = attributes.qp_state;
  const std::string path = cat(state_name(qp.state), " to ", state_name(to));
  const int given = mask & ~IBV_QP_STATE;
  if ((mask & IBV_QP_CUR_STATE) != 0 && attributes.cur_qp_state != qp.state) return cat(path, ", which is not the state that IBV_QP_CUR_STATE says");
  if (to == IBV_QPS_RESET || to == IBV_QPS_ERR) return given == 0 ? "" : cat(path, " takes no ", attribute_names(given));
  const auto* const found = std::find_if(std::begin(kTransitions), std::end(kTransitions), [&](const Transition& each) { return each.from == qp.state && each.to == to; });
  if (found == std::end(kTransitions)) return cat(path, " is no transition");
  if (const int missing = found->needed & ~given; missing != 0) return cat(path, " lacks ", attribute_names(missing));
  if (const int surplus = given & ~(found->needed | found->taken); surplus != 0) return cat(path, " takes no ", attribute_names(surplus));
  std::string reason;
  if (qp.state == IBV_QPS_RESET) reason = check_init(qp, attributes);
  if (to == IBV_QPS_RTR) reason = check_rtr(qp, attributes);
  if (to == IBV_QPS_RTS && qp.state == IBV_QPS_RTR) reason = check_rts(qp, attributes);
  return reason.empty() ? reason : cat(path, ": ", reason);
}

std::string FakeVerbs::check_init(const Qp& qp, const ibv_qp_attr& attributes) const {
  if (port_of(qp.device().config, attributes.port_num) == nullptr) return cat("device ", qp.device().config.name, " has no port ", int{attributes.port_num});
  if (attributes.pkey_index != 0) return cat("no partition key ", attributes.pkey_index);
  return {};
}

std::string FakeVerbs::check_rtr(const Qp& qp, const ibv_qp_attr& attributes) const {
  const ibv_ah_attr& path = attributes.ah_attr;
  if (port_of(qp.device().config, qp.port) == nullptr) return cat("port ", int{qp.port}, " is gone");
  const FakePort& port = *port_of(qp.device().config, qp.port);
  if (path.port_num != qp.port) return cat("the path leaves by port ", int{path.port_num}, ", the queue pair is on port ", int{qp.port});
  if (attributes.path_mtu < IBV_MTU_256 || attributes.path_mtu > IBV_MTU_4096) return cat("no path MTU has the code ", static_cast<int>(attributes.path_mtu));
  if (mtu_bytes(attributes.path_mtu) > port.mtu_active) return cat("path MTU ", mtu_bytes(attributes.path_mtu), " over the port's active ", port.mtu_active);
  if (attributes.dest_qp_num == 0 || attributes.dest_qp_num > kTwentyFourBits) return cat("no queue pair can have the number ", attributes.dest_qp_num);
  if (attributes.rq_psn > kTwentyFourBits) return cat("packet sequence number ", attributes.rq_psn, " is over 24 bits");
  if (attributes.min_rnr_timer > 31) return cat("min_rnr_timer ", int{attributes.min_rnr_timer}, " is over 31");
  if (attributes.max_dest_rd_atomic > qp.device().config.reads_max) return cat("max_dest_rd_atomic ", int{attributes.max_dest_rd_atomic}, " over the device's ", qp.device().config.reads_max);
  if (port.ethernet && path.is_global == 0) return "RoCE needs a path with is_global";
  if (path.is_global == 0) return path.dlid == 0 ? "a path with neither GID nor LID" : "";
  if (gid_at(port, path.grh.sgid_index) == nullptr) return cat("the port has no GID ", int{path.grh.sgid_index});
  if (gid_of(path.grh.dgid) == Gid{}) return "the target's GID is zero";
  return {};
}

std::string FakeVerbs::check_rts(const Qp& qp, const ibv_qp_attr& attributes) const {
  if (attributes.timeout > 31) return cat("timeout ", int{attributes.timeout}, " is over 31");
  if (attributes.retry_cnt > 7 || attributes.rnr_retry > 7) return cat("retry_cnt ", int{attributes.retry_cnt}, ", rnr_retry ", int{attributes.rnr_retry}, ": over 7");
  if (attributes.sq_psn > kTwentyFourBits) return cat("packet sequence number ", attributes.sq_psn, " is over 24 bits");
  if (attributes.max_rd_atomic > qp.device().config.reads_max) return cat("max_rd_atomic ", int{attributes.max_rd_atomic}, " over the device's ", qp.device().config.reads_max);
  return {};
}

// What is allowed and costs seconds of silence, or a queue pair for a race of microseconds.
void FakeVerbs::check_project_rules(const ibv_qp_attr& attributes, int mask) {
  const auto outside = [&](int bit, const char* name, int value, int least, int most) {
    if ((mask & bit) != 0 && (value < least || value > most)) breach(cat(name, ' ', value, " is not in ", least, " to ", most));
  };
  outside(IBV_QP_RNR_RETRY, "rnr_retry", attributes.rnr_retry, 1, 6);            // 7 is for ever
  outside(IBV_QP_MIN_RNR_TIMER, "min_rnr_timer", attributes.min_rnr_timer, 10, 14);  // 0.64 to 2.56 ms; 0 is 655 ms
  outside(IBV_QP_TIMEOUT, "timeout", attributes.timeout, 1, 31);                 // 0 is for ever
  outside(IBV_QP_RETRY_CNT, "retry_cnt", attributes.retry_cnt, 1, 6);            // 7 was seen to be for ever on soft-RoCE
  constexpr unsigned kKnown = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
  if ((mask & IBV_QP_ACCESS_FLAGS) != 0 && (attributes.qp_access_flags & ~kKnown) != 0) breach(cat("queue pair access 0x", hex64(attributes.qp_access_flags), " is more than reading"));
}

int FakeVerbs::modify_qp(ibv_qp* raw, ibv_qp_attr* attributes, int mask) {
  const Lock lock(mutex_);
  Qp* const qp = own(qps_, raw, "queue pair");
  if (qp == nullptr) return EINVAL;
  const bool has_state = (mask & IBV_QP_STATE) != 0;
  int error = qp->device().config.gone && !(has_state && (attributes->qp_state == IBV_QPS_ERR || attributes->qp_state == IBV_QPS_RESET)) ? EIO : 0;
  if (error == 0 && has_state && !faults_.empty()) {
    const std::string& device = qp->device().config.name;
    if (attributes->qp_state == IBV_QPS_INIT) error = injected(FakeCall::kModifyToInit, device);
    if (attributes->qp_state == IBV_QPS_RTR) error = injected(FakeCall::kModifyToRtr, device);
    if (attributes->qp_state == IBV_QPS_RTS) error = injected(FakeCall::kModifyToRts, device);
  }
  check_project_rules(*attributes, mask);
  if (error == 0) {
    if (std::string reason = check_transition(*qp, *attributes, mask); !reason.empty()) {
      refuse(std::move(reason));
      error = EINVAL;
    }
  }
  if (modifies_.size() == kModifiesKept) modifies_.erase(modifies_.begin());
  modifies_.push_back({qp->device().config.name, qp->qp_num, mask, *attributes, error});
  if (error == 0) take_attributes(*qp, *attributes, mask);
  return error;
}

void FakeVerbs::take_attributes(Qp& qp, const ibv_qp_attr& attributes, int mask) {
  if (attributes.qp_state == IBV_QPS_ERR) return enter_error(qp);
  if (attributes.qp_state == IBV_QPS_RESET) return reset(qp);
  if ((mask & IBV_QP_PORT) != 0) qp.port = attributes.port_num;
  if ((mask & IBV_QP_ACCESS_FLAGS) != 0) qp.access = attributes.qp_access_flags;
  if ((mask & IBV_QP_PATH_MTU) != 0) qp.mtu = mtu_bytes(attributes.path_mtu);
  if ((mask & IBV_QP_DEST_QPN) != 0) qp.peer = attributes.dest_qp_num;
  if ((mask & IBV_QP_RQ_PSN) != 0) qp.receive_sequence = attributes.rq_psn;
  if ((mask & IBV_QP_SQ_PSN) != 0) qp.send_sequence = attributes.sq_psn;
  if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) != 0) qp.reads_as_responder = attributes.max_dest_rd_atomic;
  if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) != 0) qp.reads_as_requester = attributes.max_rd_atomic;
  if ((mask & IBV_QP_AV) != 0) {
    // The entry of the GID table is looked at once, as the kernel does: indices may move later, the address stays.
    const ibv_ah_attr& path = attributes.ah_attr;
    qp.global = path.is_global != 0;
    qp.target_lid = path.dlid;
    if (qp.global) {
      const FakeGid& gid = *gid_at(*port_of(qp.device().config, qp.port), path.grh.sgid_index);
      qp.source = gid.gid;
      qp.gid_type = gid.type;
      qp.target = gid_of(path.grh.dgid);
    }
  }
  qp.state = attributes.qp_state;
}

void FakeVerbs::reset(Qp& qp) {
  drop_lines(qp, nullptr);
  qp.state = IBV_QPS_RESET;
  qp.started = qp.completed = qp.posted;
  fail_under_way(IBV_WC_RETRY_EXC_ERR, [&](const Qp&, const WorkRequest& wr) { return wr.responder == &qp; });
  forget_completions(qp, *qp.send);
  forget_completions(qp, *qp.receive);
  qp.posted = qp.started = qp.completed = qp.freed = 0;
  qp.stalled = false;
}

// The queue pair at the other end, when both ends are set up for each other and both ports are up.
FakeVerbs::Qp* FakeVerbs::responder_of(const Qp& qp) const {
  const auto found = by_number_.find(qp.peer);
  if (found == by_number_.end()) return nullptr;
  Qp& peer = *found->second;
  if ((peer.state != IBV_QPS_RTR && peer.state != IBV_QPS_RTS) || peer.orphaned || peer.peer != qp.qp_num) return nullptr;
  if (qp.device().config.gone || peer.device().config.gone || peer.receive_sequence != qp.send_sequence) return nullptr;
  const FakePort* const here = port_of(qp.device().config, qp.port);
  const FakePort* const there = port_of(peer.device().config, peer.port);
  if (here == nullptr || there == nullptr || here->state != IBV_PORT_ACTIVE || there->state != IBV_PORT_ACTIVE) return nullptr;
  if (qp.global != peer.global) return nullptr;
  if (!qp.global) return qp.target_lid == there->lid && peer.target_lid == here->lid ? &peer : nullptr;
  const bool addressed = qp.target == peer.source && peer.target == qp.source && qp.gid_type == peer.gid_type;
  return addressed && has_gid(*here, qp.source, qp.gid_type) && has_gid(*there, peer.source, peer.gid_type) ? &peer : nullptr;
}

}  // namespace paramwire::testing
