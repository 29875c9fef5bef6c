#include "paramwire/net/verbs_device.hpp"

#include "paramwire/base/env.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/net/verbs_lib.hpp"
#include "paramwire/net/verbs_ports.hpp"

#include <algorithm>
#include <array>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <utility>

namespace paramwire {

namespace {

// How long a lost packet is waited for, 4.096 us * 2^16 = 0.27 s, and how often it is asked for again: a peer that is gone is noticed in two
// seconds. Seen with rxe of Linux 6.1: 14/6 0.49 s, 10/3 0.035 s, 14/7 more than 90 s, where 7 is as good as infinite. Too short, and a busy
// peer counts as dead: with 14, 38 to 96 READs failed where 20 readers of 4 MiB blocks shared one emulated peer, with 16 and 18 none.
constexpr std::uint8_t kTimeout = 16;
constexpr std::uint8_t kRetries = 6;
// Of receiver-not-ready, which can't happen here, since nothing is ever sent: 0.64 ms (code 12), as often as a lost packet.
constexpr std::uint8_t kNotReadyTimer = 12;
constexpr std::uint8_t kHops = 64;
constexpr int kPollAtOnce = 16;

// A failed call about `device`: locked memory is what mostly lacks, and a limit is not the same as a device that can't.
Error call_error(std::string_view device, std::string_view call, int error, std::uint64_t bytes = 0) {
  const std::string what = cat("RDMA device ", device, ": ", call);
  if (error != ENOMEM) return errno_error(Code::kUnavailable, bytes > 0 ? cat(what, " of ", bytes, " bytes") : what, error);
  return Error(Code::kBackpressure, registration_error(what, bytes, error).message());
}

ibv_mtu mtu_code(std::uint16_t bytes) {
  switch (bytes) {
    case 256: return IBV_MTU_256;
    case 512: return IBV_MTU_512;
    case 1024: return IBV_MTU_1024;
    case 2048: return IBV_MTU_2048;
    default: return IBV_MTU_4096;
  }
}

}  // namespace

// ---------------------------------------------------------------- device

Result<std::shared_ptr<VerbsDevice>> VerbsDevice::open(std::shared_ptr<VerbsApi> api, const std::string& name) {
  std::shared_ptr<VerbsDevice> device(new VerbsDevice(std::move(api), name));
  device->context_ = device->api_->open_device(name);
  if (device->context_ == nullptr) return call_error(name, "ibv_open_device", errno);
  device->domain_ = device->api_->alloc_pd(device->context_);
  if (device->domain_ == nullptr) return call_error(name, "ibv_alloc_pd", errno);
  return device;
}

VerbsDevice::~VerbsDevice() {
  if (in_child()) return;
  if (domain_ != nullptr) api_->dealloc_pd(domain_);
  if (context_ != nullptr) api_->close_device(context_);
}

// ---------------------------------------------------------------- memory

Result<std::unique_ptr<VerbsMemory>> VerbsMemory::create(std::shared_ptr<VerbsDevice> device, std::span<std::byte> bytes, Access access) {
  // IBV_ACCESS_LOCAL_WRITE is for what the device writes; a region that is only read remotely goes without.
  const int flags = access == Access::kLocal ? IBV_ACCESS_LOCAL_WRITE : IBV_ACCESS_REMOTE_READ;
  ibv_mr* region = device->api().reg_mr(device->domain(), bytes.data(), bytes.size(), flags);
  if (region == nullptr) return call_error(device->name(), "ibv_reg_mr", errno, bytes.size());
  return std::unique_ptr<VerbsMemory>(new VerbsMemory(std::move(device), region, bytes));
}

VerbsMemory::~VerbsMemory() {
  if (!device_->in_child()) device_->api().dereg_mr(region_);
}

std::uint32_t VerbsMemory::local_key() const noexcept { return region_->lkey; }
std::uint32_t VerbsMemory::remote_key() const noexcept { return region_->rkey; }

// ---------------------------------------------------------------- failures

// Source: InfiniBand specification 1.4, 11.6.2, "Completion return status"; names as ibv_wc_status_str(3) has them.
VerbsFailure verbs_failure(int status) noexcept {
  switch (status) {
    case IBV_WC_LOC_LEN_ERR: return {status, "local length error", "the read is longer than the device's max_msg_sz"};
    case IBV_WC_LOC_QP_OP_ERR: return {status, "local QP operation error", "the device refused the request: report a bug"};
    case IBV_WC_LOC_PROT_ERR: return {status, "local protection error", "the target's registration is gone: keep a buffer registered while it is read into"};
    case IBV_WC_WR_FLUSH_ERR: return {status, "work request flushed error", "an earlier request of this connection failed, or its device was reset"};
    case IBV_WC_LOC_ACCESS_ERR: return {status, "local access error", "the target may not be written by the device"};
    case IBV_WC_REM_INV_REQ_ERR: return {status, "remote invalid request error", "the server's device takes no READ of this size or number"};
    case IBV_WC_REM_ACCESS_ERR: return {status, "remote access error", "the server's memory is not registered any more: it restarted, or withdrew the region"};
    case IBV_WC_REM_OP_ERR: return {status, "remote operation error", "the server's device failed"};
    case IBV_WC_RETRY_EXC_ERR: return {status, "transport retry counter exceeded", "the server is gone, its port is down, or the path drops packets of this MTU"};
    case IBV_WC_RNR_RETRY_EXC_ERR: return {status, "RNR retry counter exceeded", "the server's end takes no requests"};
    case IBV_WC_REM_ABORT_ERR: return {status, "remote aborted error", "the server ended the connection"};
    case IBV_WC_FATAL_ERR: return {status, "fatal error", "the device failed"};
    case IBV_WC_RESP_TIMEOUT_ERR: return {status, "response timeout error", "the server's device does not answer"};
    default: return {status, "error", "see enum ibv_wc_status"};
  }
}

// ---------------------------------------------------------------- queue pairs

Error VerbsQueue::failure(std::string_view call, int error, std::uint64_t bytes) const {
  return call_error(cat(choice_.device, " port ", static_cast<unsigned>(choice_.port), " GID ", choice_.gid_index), call, error, bytes);
}

Result<std::unique_ptr<VerbsQueue>> VerbsQueue::create(std::shared_ptr<VerbsDevice> device, const VerbsChoice& choice, const Options& options) {
  std::unique_ptr<VerbsQueue> queue(new VerbsQueue(std::move(device), choice, options));
  VerbsApi& api = queue->device_->api();
  const std::uint32_t depth = std::max<std::uint32_t>(1, options.depth);
  if (options.depth > 0) {
    queue->channel_ = api.create_comp_channel(queue->device_->context());
    if (queue->channel_ == nullptr) return queue->failure("ibv_create_comp_channel", errno);
  }
  queue->completions_ = api.create_cq(queue->device_->context(), static_cast<int>(depth), queue->channel_);
  if (queue->completions_ == nullptr) return queue->failure(cat("ibv_create_cq of ", depth, " entries"), errno);
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = queue->completions_;
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = depth;
  wanted.cap.max_send_sge = 1;
  wanted.cap.max_recv_wr = wanted.cap.max_recv_sge = 1;
  queue->pair_ = api.create_qp(queue->device_->domain(), &wanted);
  if (queue->pair_ == nullptr) return queue->failure("ibv_create_qp", errno);
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = choice.port;
  attributes.qp_access_flags = options.depth > 0 ? 0 : static_cast<unsigned>(IBV_ACCESS_REMOTE_READ);
  const int error = api.modify_qp(queue->pair_, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (error != 0) return queue->failure("ibv_modify_qp to INIT", error);

  PARAMWIRE_TRY(random, system_random());
  queue->end_.gid = choice.gid;
  queue->end_.queue_pair = queue->pair_->qp_num;
  queue->end_.packet = static_cast<std::uint32_t>(random & 0xffffff);
  queue->end_.mtu = choice.mtu;
  queue->end_.lid = choice.lid;
  queue->end_.type = static_cast<std::uint8_t>(choice.type);
  queue->end_.reads = static_cast<std::uint8_t>(std::clamp<std::uint32_t>(std::min<std::uint32_t>(options.reads, choice.reads_max), 1, 255));
  queue->doorbells_.resize(depth);
  return queue;
}

VerbsQueue::~VerbsQueue() {
  if (device_->in_child()) return;
  VerbsApi& api = device_->api();
  if (pair_ != nullptr) api.destroy_qp(pair_);
  if (completions_ != nullptr) api.destroy_cq(completions_);
  if (channel_ != nullptr) api.destroy_comp_channel(channel_);
}

Status VerbsQueue::connect(const VerbsEnd& remote) {
  VerbsApi& api = device_->api();
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = mtu_code(remote.mtu);
  attributes.dest_qp_num = remote.queue_pair;
  attributes.rq_psn = remote.packet;
  attributes.max_dest_rd_atomic = remote.reads;
  attributes.min_rnr_timer = kNotReadyTimer;
  attributes.ah_attr.port_num = choice_.port;
  attributes.ah_attr.dlid = remote.lid;
  // RoCE always goes by GID; InfiniBand does where the other end is in another subnet: its GID begins with another prefix.
  if (choice_.ethernet || !std::equal(remote.gid.begin(), remote.gid.begin() + 8, choice_.gid.begin())) {
    attributes.ah_attr.is_global = 1;
    std::memcpy(attributes.ah_attr.grh.dgid.raw, remote.gid.data(), remote.gid.size());
    attributes.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(choice_.gid_index);
    attributes.ah_attr.grh.hop_limit = kHops;
  }
  int error = api.modify_qp(pair_, &attributes, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (error != 0) return failure(cat("ibv_modify_qp to RTR (towards GID ", to_string(remote.gid), ", queue pair ", remote.queue_pair, ", MTU ", remote.mtu, ")"), error);
  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = kTimeout;
  attributes.retry_cnt = kRetries;
  attributes.rnr_retry = kRetries;
  attributes.sq_psn = end_.packet;
  attributes.max_rd_atomic = remote.reads;
  error = api.modify_qp(pair_, &attributes, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  if (error != 0) return failure("ibv_modify_qp to RTS", error);
  return {};
}

Status VerbsQueue::post(std::span<const VerbsRead> reads) {
  assert(!reads.empty() && reads.size() <= options_.depth - outstanding_);
  constexpr std::size_t kAtOnce = 64;
  std::array<ibv_send_wr, kAtOnce> requests;
  std::array<ibv_sge, kAtOnce> places;
  assert(reads.size() <= kAtOnce);
  for (std::size_t i = 0; i < reads.size(); ++i) {
    const VerbsRead& read = reads[i];
    places[i] = {reinterpret_cast<std::uintptr_t>(read.into), read.size, read.local_key};
    ibv_send_wr& request = requests[i] = {};
    request.wr_id = read.size;  // what a failed one is told by: nothing else is
    request.opcode = IBV_WR_RDMA_READ;
    request.sg_list = &places[i];
    request.num_sge = 1;
    request.wr.rdma.remote_addr = read.remote;
    request.wr.rdma.rkey = read.remote_key;
    request.next = i + 1 < reads.size() ? &requests[i + 1] : nullptr;
    if (request.next == nullptr) request.send_flags = IBV_SEND_SIGNALED;
  }
  ibv_send_wr* refused = nullptr;
  const int error = device_->api().post_send(pair_, requests.data(), &refused);
  if (error != 0) return Error(Code::kUnreachable, failure("ibv_post_send", error).message());
  doorbells_[(first_doorbell_ + doorbell_count_++) % doorbells_.size()] = static_cast<std::uint32_t>(reads.size());
  outstanding_ += reads.size();
  return {};
}

Result<std::size_t> VerbsQueue::poll() {
  std::array<ibv_wc, kPollAtOnce> came;
  const int count = device_->api().poll_cq(completions_, kPollAtOnce, came.data());
  if (count < 0) return Error(Code::kUnreachable, failure("ibv_poll_cq", EIO).message());
  std::size_t done = 0;
  for (int i = 0; i < count; ++i) {
    const ibv_wc& completion = came[static_cast<std::size_t>(i)];
    if (completion.status != IBV_WC_SUCCESS) {
      failed_ = completion.status;
      const VerbsFailure why = verbs_failure(completion.status);
      return Error(Code::kUnreachable, cat("RDMA READ of ", completion.wr_id, " bytes over ", choice_.to_string(), " failed: ", why.name, " (status ", why.status, "): ", why.hint));
    }
    assert(doorbell_count_ > 0);
    done += doorbells_[first_doorbell_];
    first_doorbell_ = (first_doorbell_ + 1) % doorbells_.size();
    --doorbell_count_;
  }
  outstanding_ -= done;
  return done;
}

Status VerbsQueue::arm() {
  while (device_->api().take_cq_event(channel_) == 0) {  // of completions that were seen already
  }
  const int error = device_->api().req_notify_cq(completions_);
  if (error != 0) return Error(Code::kUnreachable, failure("ibv_req_notify_cq", error).message());
  return {};
}

int VerbsQueue::fd() const noexcept { return channel_->fd; }

}  // namespace paramwire
