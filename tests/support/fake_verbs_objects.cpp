// Making and destroying the objects of the fake fabric, and what their makers may ask of a device.
#include "support/fake_verbs_objects.hpp"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <sys/eventfd.h>
#include <unistd.h>

namespace paramwire::testing {

namespace {

constexpr std::uint64_t kPage = 4096;

std::uint64_t pages_of(std::uintptr_t begin, std::uint64_t size) {
  return ((begin + size + kPage - 1) / kPage - begin / kPage) * kPage;
}

// Whether every page of the range is mapped so: what pinning the pages would find.
bool is_mapped(std::uintptr_t begin, std::uint64_t size, bool writable) {
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return false;
  const std::uintptr_t end = begin + size;
  char line[512];
  bool starts_line = true;
  while (begin < end && std::fgets(line, sizeof line, maps) != nullptr) {
    const bool starts = starts_line;
    starts_line = std::strchr(line, '\n') != nullptr;
    std::uintptr_t from = 0, to = 0;
    char rights[5] = "";
    if (!starts || std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s", &from, &to, rights) != 3 || to <= begin) continue;
    if (from > begin || rights[0] != 'r' || (writable && rights[1] != 'w')) break;
    begin = to;
  }
  std::fclose(maps);
  return begin >= end;
}

ibv_mtu mtu_code(std::uint32_t bytes) {
  ibv_mtu code = IBV_MTU_256;
  for (std::uint32_t size = 256; size < bytes && code < IBV_MTU_4096; size *= 2) code = static_cast<ibv_mtu>(code + 1);
  return code;
}

std::nullptr_t failed(int error) {
  errno = error;
  return nullptr;
}

}  // namespace

// ---------------------------------------------------------------- devices

Result<std::vector<std::string>> FakeVerbs::device_names() {
  const Lock lock(mutex_);
  if (const int error = injected(FakeCall::kDeviceNames, {})) return errno_error(Code::kUnavailable, "list the RDMA devices", error);
  std::vector<std::string> names;
  for (const auto& device : devices_) {
    if (!device->config.gone) names.push_back(device->config.name);
  }
  return names;
}

ibv_context* FakeVerbs::open_device(const std::string& name) {
  const Lock lock(mutex_);
  Device* const device = find(name);
  const int error = device == nullptr || device->config.gone ? ENODEV : injected(FakeCall::kOpenDevice, name);
  if (error != 0) return failed(error);
  auto context = std::make_unique<Context>();
  context->owner = device;
  context->device = &device->handle;
  context->cmd_fd = context->async_fd = -1;
  context->num_comp_vectors = 2;
  ++device->live.contexts;
  Context* const raw = context.get();
  contexts_.emplace(static_cast<ibv_context*>(raw), std::move(context));
  return raw;
}

int FakeVerbs::close_device(ibv_context* raw) {
  const Lock lock(mutex_);
  Context* const context = own(contexts_, raw, "context");
  if (context == nullptr) return EINVAL;
  if (context->objects > 0) {
    breach(cat("device ", context->owner->config.name, " is closed with ", context->objects, " objects on it"));
    return EBUSY;
  }
  --context->owner->live.contexts;
  contexts_.erase(raw);
  return 0;
}

int FakeVerbs::query_device(ibv_context* raw, ibv_device_attr* out) {
  const Lock lock(mutex_);
  Context* const context = own(contexts_, raw, "context");
  if (context == nullptr) return EINVAL;
  if (const int error = usable(FakeCall::kQueryDevice, *context->owner)) return error;
  const FakeDevice& device = context->owner->config;
  *out = {};
  out->max_mr_size = device.region_bytes_max;
  out->max_qp = device.qps_max;
  out->max_qp_wr = device.work_requests_max;
  out->max_sge = out->max_sge_rd = device.sges_max;
  out->max_cq = device.cqs_max;
  out->max_cqe = device.cqes_max;
  out->max_mr = device.regions_max;
  out->max_pd = device.pds_max;
  out->max_qp_rd_atom = out->max_qp_init_rd_atom = device.reads_max;
  out->max_pkeys = 1;
  out->phys_port_cnt = static_cast<std::uint8_t>(device.ports.size());
  return 0;
}

int FakeVerbs::query_port(ibv_context* raw, std::uint8_t number, ibv_port_attr* out) {
  const Lock lock(mutex_);
  Context* const context = own(contexts_, raw, "context");
  if (context == nullptr) return EINVAL;
  if (const int error = usable(FakeCall::kQueryPort, *context->owner)) return error;
  const FakePort* const port = port_of(context->owner->config, number);
  if (port == nullptr) return EINVAL;
  *out = {};
  out->state = port->state;
  out->max_mtu = mtu_code(port->mtu_max);
  out->active_mtu = mtu_code(port->mtu_active);
  out->max_msg_sz = port->message_max;
  for (const FakeGid& gid : port->gids) out->gid_tbl_len = std::max(out->gid_tbl_len, static_cast<int>(gid.index) + 1);
  out->pkey_tbl_len = 1;
  out->lid = port->lid;
  out->link_layer = port->ethernet ? IBV_LINK_LAYER_ETHERNET : IBV_LINK_LAYER_INFINIBAND;
  return 0;
}

ssize_t FakeVerbs::query_gid_table(ibv_context* raw, ibv_gid_entry* entries, std::size_t count_max) {
  const Lock lock(mutex_);
  Context* const context = own(contexts_, raw, "context");
  if (context == nullptr) return -EINVAL;
  if (const int error = usable(FakeCall::kQueryGids, *context->owner)) return -error;
  std::size_t count = 0;
  std::uint32_t number = 0;
  for (const FakePort& port : context->owner->config.ports) {
    ++number;
    for (const FakeGid& gid : port.gids) {
      if (count == count_max) return -EINVAL;  // as the kernel: a table too small is an error, not a part
      ibv_gid_entry& entry = entries[count++];
      entry = {};
      std::memcpy(entry.gid.raw, gid.gid.data(), gid.gid.size());
      entry.gid_index = gid.index;
      entry.port_num = number;
      entry.gid_type = static_cast<std::uint32_t>(gid.type);
      entry.ndev_ifindex = gid.ifindex;
    }
  }
  return static_cast<ssize_t>(count);
}

// ---------------------------------------------------------------- domains and regions

ibv_pd* FakeVerbs::alloc_pd(ibv_context* raw) {
  const Lock lock(mutex_);
  Context* const context = own(contexts_, raw, "context");
  int error = context == nullptr ? EINVAL : usable(FakeCall::kAllocPd, *context->owner);
  if (error == 0 && context->owner->live.pds >= context->owner->config.pds_max) error = ENOMEM;
  if (error != 0) return failed(error);
  auto pd = std::make_unique<Pd>();
  pd->context = context;
  pd->owner = context;
  ++context->objects;
  ++context->owner->live.pds;
  Pd* const made = pd.get();
  pds_.emplace(static_cast<ibv_pd*>(made), std::move(pd));
  return made;
}

int FakeVerbs::dealloc_pd(ibv_pd* raw) {
  const Lock lock(mutex_);
  Pd* const pd = own(pds_, raw, "protection domain");
  if (pd == nullptr) return EINVAL;
  if (pd->users > 0) {
    breach(cat("a protection domain is given up with ", pd->users, " regions and queue pairs in it"));
    return EBUSY;
  }
  --pd->owner->objects;
  --pd->owner->owner->live.pds;
  pds_.erase(raw);
  return 0;
}

ibv_mr* FakeVerbs::reg_mr(ibv_pd* raw, void* begin, std::size_t size, int access) {
  const Lock lock(mutex_);
  Pd* const pd = own(pds_, raw, "protection domain");
  int error = pd == nullptr ? EINVAL : usable(FakeCall::kRegMr, *pd->owner->owner);
  if (error != 0) return failed(error);
  Device& device = *pd->owner->owner;
  constexpr int kKnown = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING;
  constexpr int kRemoteWrites = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  if ((access & ~kKnown) != 0) breach(cat("memory is registered with access 0x", hex64(static_cast<std::uint64_t>(access)), ", more than this project needs"));
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::uint64_t locked = pages_of(address, size);
  if (size == 0 || ((access & kRemoteWrites) != 0 && (access & IBV_ACCESS_LOCAL_WRITE) == 0)) {
    refuse(size == 0 ? "a region of no bytes" : "remote writing without local writing");
    error = EINVAL;
  } else if (size > device.config.region_bytes_max || device.live.regions >= device.config.regions_max ||
             device.live.registered_bytes + locked > device.config.locked_bytes_max) {
    error = ENOMEM;
  } else if (!is_mapped(address, size, (access & IBV_ACCESS_LOCAL_WRITE) != 0)) {
    error = EFAULT;
  }
  if (error != 0) return failed(error);

  auto mr = std::make_unique<Mr>();
  mr->context = pd->owner;
  mr->pd = pd;
  mr->owner = pd;
  mr->addr = begin;
  mr->length = size;
  mr->access = access;
  mr->locked_bytes = locked;
  const auto key = 2 * (kKeyFirst + static_cast<std::uint32_t>(by_key_.size()));
  mr->lkey = key;
  mr->rkey = key + 1;
  by_key_.push_back(mr.get());
  ++pd->users;
  ++pd->owner->objects;
  ++device.live.regions;
  device.live.registered_bytes += locked;
  ++totals_.registrations;
  Mr* const made = mr.get();
  mrs_.emplace(static_cast<ibv_mr*>(made), std::move(mr));
  return made;
}

int FakeVerbs::dereg_mr(ibv_mr* raw) {
  const Lock lock(mutex_);
  Mr* const mr = own(mrs_, raw, "memory region");
  if (mr == nullptr) return EINVAL;
  fail_under_way(IBV_WC_REM_ACCESS_ERR, [&](const Qp&, const WorkRequest& wr) { return wr.remote == mr; });
  fail_under_way(IBV_WC_LOC_PROT_ERR, [&](const Qp& qp, const WorkRequest& wr) {
    const ibv_sge* const sges = qp.sges_of(wr);
    return std::any_of(sges, sges + wr.sge_count, [&](const ibv_sge& sge) { return sge.lkey == mr->lkey; });
  });
  by_key_[mr->lkey / 2 - kKeyFirst] = nullptr;
  --mr->owner->users;
  --mr->owner->owner->objects;
  --mr->owner->owner->owner->live.regions;
  mr->owner->owner->owner->live.registered_bytes -= mr->locked_bytes;
  mrs_.erase(raw);
  return 0;
}

// ---------------------------------------------------------------- completion queues

ibv_comp_channel* FakeVerbs::create_comp_channel(ibv_context* raw) {
  const Lock lock(mutex_);
  Context* const context = own(contexts_, raw, "context");
  int error = context == nullptr ? EINVAL : usable(FakeCall::kCreateChannel, *context->owner);
  if (error != 0) return failed(error);
  auto channel = std::make_unique<Channel>();
  channel->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE);
  if (channel->fd < 0) return nullptr;  // errno is eventfd's
  channel->context = context;
  channel->owner = context;
  ++context->objects;
  ++context->owner->live.channels;
  Channel* const made = channel.get();
  channels_.emplace(static_cast<ibv_comp_channel*>(made), std::move(channel));
  return made;
}

int FakeVerbs::destroy_comp_channel(ibv_comp_channel* raw) {
  const Lock lock(mutex_);
  Channel* const channel = own(channels_, raw, "completion channel");
  if (channel == nullptr) return EINVAL;
  if (channel->refcnt > 0) {
    breach(cat("a completion channel is destroyed with ", channel->refcnt, " queues on it"));
    return EBUSY;
  }
  close(channel->fd);
  --channel->owner->objects;
  --channel->owner->owner->live.channels;
  channels_.erase(raw);
  return 0;
}

ibv_cq* FakeVerbs::create_cq(ibv_context* raw, int entries, ibv_comp_channel* raw_channel) {
  const Lock lock(mutex_);
  Context* const context = own(contexts_, raw, "context");
  Channel* const channel = raw_channel != nullptr ? own(channels_, raw_channel, "completion channel") : nullptr;
  const bool known = context != nullptr && (raw_channel == nullptr || (channel != nullptr && channel->owner == context));
  int error = known ? usable(FakeCall::kCreateCq, *context->owner) : EINVAL;
  if (error == 0 && (entries < 1 || entries > context->owner->config.cqes_max)) {
    refuse(cat("a completion queue of ", entries, " entries, of at most ", context->owner->config.cqes_max));
    error = EINVAL;
  }
  if (error == 0 && context->owner->live.cqs >= context->owner->config.cqs_max) error = ENOMEM;
  if (error != 0) return failed(error);
  auto cq = std::make_unique<Cq>();
  cq->context = context;
  cq->owner = context;
  cq->channel = channel;
  cq->cqe = entries;
  cq->ring.resize(static_cast<std::size_t>(entries));
  if (channel != nullptr) ++channel->refcnt;
  ++context->objects;
  ++context->owner->live.cqs;
  Cq* const made = cq.get();
  cqs_.emplace(static_cast<ibv_cq*>(made), std::move(cq));
  return made;
}

int FakeVerbs::destroy_cq(ibv_cq* raw) {
  const Lock lock(mutex_);
  Cq* const cq = own(cqs_, raw, "completion queue");
  if (cq == nullptr) return EINVAL;
  if (cq->users > 0) {
    breach(cat("a completion queue is destroyed with ", cq->users, " users"));
    return EBUSY;
  }
  if (cq->channel != nullptr) --cq->channel->refcnt;
  --cq->owner->objects;
  --cq->owner->owner->live.cqs;
  cqs_.erase(raw);
  return 0;
}

// ---------------------------------------------------------------- queue pairs

ibv_qp* FakeVerbs::create_qp(ibv_pd* raw, ibv_qp_init_attr* attributes) {
  const Lock lock(mutex_);
  Pd* const pd = own(pds_, raw, "protection domain");
  int error = pd == nullptr ? EINVAL : usable(FakeCall::kCreateQp, *pd->owner->owner);
  if (error != 0) return failed(error);
  Device& device = *pd->owner->owner;
  const ibv_qp_cap& cap = attributes->cap;
  Cq* const send = own(cqs_, attributes->send_cq, "completion queue");
  Cq* const receive = own(cqs_, attributes->recv_cq, "completion queue");
  const auto limit = static_cast<std::uint32_t>(device.config.work_requests_max), sges = static_cast<std::uint32_t>(device.config.sges_max);
  std::string reason;
  if (send == nullptr || receive == nullptr || send->owner != pd->owner || receive->owner != pd->owner) reason = "without two completion queues of its device";
  else if (attributes->qp_type != IBV_QPT_RC) reason = "of a type other than RC";
  else if (cap.max_send_wr == 0 || cap.max_send_wr > limit || cap.max_recv_wr > limit) reason = cat("for ", cap.max_send_wr, " sends and ", cap.max_recv_wr, " receives, of at most ", limit);
  else if (cap.max_send_sge == 0 || cap.max_send_sge > sges || cap.max_recv_sge > sges) reason = cat("for ", cap.max_send_sge, " pieces of a send, of at most ", sges);
  if (!reason.empty()) {
    refuse("a queue pair " + reason);
    error = EINVAL;
  } else if (device.live.qps >= device.config.qps_max) {
    error = ENOMEM;
  }
  if (error != 0) return failed(error);

  auto qp = std::make_unique<Qp>();
  qp->context = pd->owner;
  qp->owner = pd->owner;
  qp->pd = qp->domain = pd;
  qp->send_cq = qp->send = send;
  qp->recv_cq = qp->receive = receive;
  qp->qp_context = attributes->qp_context;
  qp->qp_num = qp_number_next_;
  qp->state = IBV_QPS_RESET;
  qp->qp_type = IBV_QPT_RC;
  qp->signal_all = attributes->sq_sig_all != 0;
  qp->sges_max = cap.max_send_sge;
  qp->ring.resize(cap.max_send_wr);
  qp->sges.resize(std::size_t{cap.max_send_wr} * cap.max_send_sge);
  qp_number_next_ = (qp_number_next_ + 7) & 0xffffff;  // 24 bits; a step, so that a neighbour's number is nobody's
  by_number_[qp->qp_num] = qp.get();
  ++pd->users;
  ++send->users;
  ++receive->users;
  ++pd->owner->objects;
  ++device.live.qps;
  ++totals_.qps_made;
  Qp* const made = qp.get();
  qps_.emplace(static_cast<ibv_qp*>(made), std::move(qp));
  return made;
}

int FakeVerbs::destroy_qp(ibv_qp* raw) {
  Lock lock(mutex_);
  Qp* const qp = own(qps_, raw, "queue pair");
  if (qp == nullptr) return EINVAL;
  changed_.wait(lock, [&] { return !qp->pumped; });
  reset(*qp);
  by_number_.erase(qp->qp_num);
  --qp->domain->users;
  --qp->send->users;
  --qp->receive->users;
  --qp->owner->objects;
  --qp->device().live.qps;
  qps_.erase(raw);
  return 0;
}

}  // namespace paramwire::testing
