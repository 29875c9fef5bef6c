// Two ends of an RDMA connection over the fake fabric, made by hand: for tests of the fabric itself and of what is built on raw queue pairs.
#pragma once

#include "support/fake_verbs.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <poll.h>
#include <span>
#include <string>
#include <vector>

namespace paramwire::testing {

// Attributes that are right; a test spoils one of them.
struct RawEndOptions {
  int cq_entries = 64;
  std::uint32_t send_max = 16, sge_max = 4;
  bool signal_all = false;
  std::uint8_t gid_index = 1;
  ibv_mtu mtu = IBV_MTU_4096;
  std::uint8_t reads = 16;
  unsigned access = IBV_ACCESS_REMOTE_READ;
};

// One end: a device opened, one queue pair with its completion queue and channel.
struct RawEnd {
  RawEnd(FakeVerbs& api, const std::string& device, const RawEndOptions& options = {}) : verbs(api), wanted(options) {
    context = verbs.open_device(device);
    pd = verbs.alloc_pd(context);
    channel = verbs.create_comp_channel(context);
    cq = verbs.create_cq(context, wanted.cq_entries, channel);
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq;
    init.qp_type = IBV_QPT_RC;
    init.cap.max_send_wr = wanted.send_max;
    init.cap.max_send_sge = wanted.sge_max;
    init.sq_sig_all = wanted.signal_all ? 1 : 0;
    qp = verbs.create_qp(pd, &init);
    EXPECT_NE(qp, nullptr);
    ibv_gid_entry entries[16];
    const ssize_t count = verbs.query_gid_table(context, entries, std::size(entries));
    for (ssize_t i = 0; i < count; ++i) {
      if (entries[i].gid_index == wanted.gid_index) gid = entries[i].gid;
    }
  }
  ~RawEnd() { close(); }
  RawEnd(const RawEnd&) = delete;
  RawEnd& operator=(const RawEnd&) = delete;

  void close() {
    if (context == nullptr) return;
    if (qp != nullptr) destroy_qp();
    for (ibv_mr* region : regions) EXPECT_EQ(verbs.dereg_mr(region), 0);
    EXPECT_EQ(verbs.destroy_cq(cq), 0);
    EXPECT_EQ(verbs.destroy_comp_channel(channel), 0);
    EXPECT_EQ(verbs.dealloc_pd(pd), 0);
    EXPECT_EQ(verbs.close_device(context), 0);
    regions.clear();
    context = nullptr;
  }
  void destroy_qp() {
    EXPECT_EQ(verbs.destroy_qp(qp), 0);
    qp = nullptr;
  }

  ibv_mr* share(std::span<std::byte> bytes, int access) {
    ibv_mr* const region = verbs.reg_mr(pd, bytes.data(), bytes.size(), access);
    if (region != nullptr) regions.push_back(region);
    return region;
  }
  void unshare(ibv_mr* region) {
    std::erase(regions, region);
    EXPECT_EQ(verbs.dereg_mr(region), 0);
  }

  static constexpr int kInit = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
  static constexpr int kRtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  static constexpr int kRts = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;

  ibv_qp_attr init_attributes() const {
    ibv_qp_attr out{};
    out.qp_state = IBV_QPS_INIT;
    out.port_num = 1;
    out.qp_access_flags = wanted.access;
    return out;
  }
  ibv_qp_attr rtr_attributes(const RawEnd& peer) const {
    ibv_qp_attr out{};
    out.qp_state = IBV_QPS_RTR;
    out.path_mtu = wanted.mtu;
    out.dest_qp_num = peer.qp->qp_num;
    out.rq_psn = peer.qp->qp_num + 100;
    out.max_dest_rd_atomic = wanted.reads;
    out.min_rnr_timer = 12;
    out.ah_attr.is_global = 1;
    out.ah_attr.port_num = 1;
    out.ah_attr.grh.dgid = peer.gid;
    out.ah_attr.grh.sgid_index = wanted.gid_index;
    out.ah_attr.grh.hop_limit = 64;
    return out;
  }
  ibv_qp_attr rts_attributes() const {
    ibv_qp_attr out{};
    out.qp_state = IBV_QPS_RTS;
    out.timeout = 14;
    out.retry_cnt = 5;
    out.rnr_retry = 6;
    out.sq_psn = qp->qp_num + 100;
    out.max_rd_atomic = wanted.reads;
    return out;
  }
  int modify(ibv_qp_attr attributes, int mask) { return verbs.modify_qp(qp, &attributes, mask); }
  int to_init() { return modify(init_attributes(), kInit); }
  int to_rtr(const RawEnd& peer) { return modify(rtr_attributes(peer), kRtr); }
  int to_rts() { return modify(rts_attributes(), kRts); }
  int to_state(ibv_qp_state state) {
    ibv_qp_attr attributes{};
    attributes.qp_state = state;
    return modify(attributes, IBV_QP_STATE);
  }

  // One READ; `more` is chained behind it.
  int read(const std::vector<ibv_sge>& pieces, std::uint64_t remote, std::uint32_t rkey, std::uint64_t id, unsigned flags = IBV_SEND_SIGNALED) {
    std::vector<ibv_sge> own = pieces;
    ibv_send_wr wr{}, *bad = nullptr;
    wr.wr_id = id;
    wr.sg_list = own.data();
    wr.num_sge = static_cast<int>(own.size());
    wr.opcode = IBV_WR_RDMA_READ;
    wr.send_flags = flags;
    wr.wr.rdma.remote_addr = remote;
    wr.wr.rdma.rkey = rkey;
    return verbs.post_send(qp, &wr, &bad);
  }

  // Polls until `count` completions came; fewer after `polls` polls that brought nothing.
  // The next event of the channel, taken. Channels do not block, so their descriptor is waited for.
  int wait_event() {
    pollfd entry{channel->fd, POLLIN, 0};
    return ::poll(&entry, 1, 10'000) == 1 ? verbs.take_cq_event(channel) : ETIMEDOUT;
  }
  std::vector<ibv_wc> completions(std::size_t count, int polls = 10'000) {
    std::vector<ibv_wc> out;
    while (out.size() < count && polls-- > 0) {
      ibv_wc wc[8];
      const int n = verbs.poll_cq(cq, static_cast<int>(std::size(wc)), wc);
      if (n < 0) break;
      out.insert(out.end(), wc, wc + n);
    }
    return out;
  }

  FakeVerbs& verbs;
  RawEndOptions wanted;
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_comp_channel* channel = nullptr;
  ibv_cq* cq = nullptr;
  ibv_qp* qp = nullptr;
  ibv_gid gid{};
  std::vector<ibv_mr*> regions;
};

// Both ends ready to send.
inline void connect(RawEnd& one, RawEnd& other) {
  ASSERT_EQ(one.to_init(), 0);
  ASSERT_EQ(other.to_init(), 0);
  ASSERT_EQ(one.to_rtr(other), 0);
  ASSERT_EQ(other.to_rtr(one), 0);
  ASSERT_EQ(one.to_rts(), 0);
  ASSERT_EQ(other.to_rts(), 0);
}

inline std::uint64_t address_of(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

inline FakeFabric two_devices(Delivery delivery = Delivery::kAtPost, std::uint64_t seed = 1) {
  return {{FakeDevice::roce("rx0", "10.9.0.1"), FakeDevice::roce("rx1", "10.9.0.2")}, delivery, seed};
}

// A client on rx0 and a server on rx1 with bytes to read, connected.
struct RawPair {
  static constexpr std::size_t kLines = 1024;

  explicit RawPair(const FakeFabric& configuration = two_devices(), const RawEndOptions& options = {})
      : fabric(configuration), client(fabric, "rx0", options), server(fabric, "rx1", options), source(std::as_writable_bytes(std::span(source_lines))),
        target(std::as_writable_bytes(std::span(target_lines))) {
    for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 31 + i / 251 + 1);
    shared = server.share(source, IBV_ACCESS_REMOTE_READ);
    local = client.share(target, IBV_ACCESS_LOCAL_WRITE);
    connect(client, server);
  }

  int read(std::size_t offset, std::size_t size, std::uint64_t id = 1, unsigned flags = IBV_SEND_SIGNALED) {
    return client.read({piece(offset, size)}, address_of(source.data() + offset), shared->rkey, id, flags);
  }
  ibv_sge piece(std::size_t offset, std::size_t size) const { return {address_of(target.data() + offset), static_cast<std::uint32_t>(size), local->lkey}; }
  // The status of the next completion.
  ibv_wc_status status() {
    const auto done = client.completions(1, 1000);
    EXPECT_EQ(done.size(), 1U) << "no completion came";
    return done.empty() ? IBV_WC_GENERAL_ERR : done[0].status;
  }
  bool arrived(std::size_t offset, std::size_t size) const { return std::memcmp(target.data() + offset, source.data() + offset, size) == 0; }
  bool untouched(std::size_t offset, std::size_t size) const {
    for (std::size_t i = 0; i < size; ++i) {
      if (target[offset + i] != std::byte{0}) return false;
    }
    return true;
  }

  FakeVerbs fabric;
  struct alignas(64) CacheLine {
    std::byte bytes[64];
  };
  std::vector<CacheLine> source_lines = std::vector<CacheLine>(kLines), target_lines = std::vector<CacheLine>(kLines);
  RawEnd client, server;
  std::span<std::byte> source, target;
  ibv_mr* shared = nullptr;
  ibv_mr* local = nullptr;
};

}  // namespace paramwire::testing
