// A fake RDMA fabric behind VerbsApi: devices, queue pairs and memory regions in this process, held to the rules of the specification, with faults
// on demand. For unit tests and for the conformance suite; server and client of a test use one instance.
//
// What it refuses that soft-RoCE lets pass: attributes that a transition needs and did not get, a READ longer than the port's max_msg_sz, an unsignalled
// flood of the send queue, local and remote keys mixed up (they always differ here), keys and queue pair numbers of an earlier life (never given twice).
// Only RDMA READ exists. Sources: InfiniBand specification 1.4, chapters 9 to 11; ibv_modify_qp(3), ibv_post_send(3), ibv_poll_cq(3), ibv_reg_mr(3).
//
// Threads: any, but for Delivery::kLines (one thread). Only the callbacks of change() and on_line() run with a lock held.
#pragma once

#include "paramwire/base/env.hpp"
#include "paramwire/net/verbs_lib.hpp"
#include "paramwire/net/verbs_route.hpp"

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

namespace paramwire::testing {

struct FakeGid {
  std::uint32_t index = 0;
  Gid gid{};
  GidType type = GidType::kRoceV2;
  std::uint32_t ifindex = 1;  // network interface; 1 is the loopback of every network namespace
};

struct FakePort {
  std::uint32_t mtu_max = 4096, mtu_active = 4096;  // bytes
  ibv_port_state state = IBV_PORT_ACTIVE;
  bool ethernet = true;
  std::uint16_t lid = 0;  // InfiniBand
  std::uint32_t message_max = 8U << 20;  // bytes of one READ
  std::vector<FakeGid> gids;
};

// Limits are those of soft-RoCE in Linux 6.1 unless a test says otherwise.
struct FakeDevice {
  std::string name;
  std::vector<FakePort> ports;
  int reads_max = 128;  // outstanding READs of a queue pair, as requester and as responder
  int qps_max = 65536, work_requests_max = 1 << 16, sges_max = 32;
  int cqs_max = 65536, cqes_max = 32767, pds_max = 65536, regions_max = 524287;
  std::uint64_t region_bytes_max = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t locked_bytes_max = std::numeric_limits<std::uint64_t>::max();  // RLIMIT_MEMLOCK of the process that uses it
  bool gone = false;  // unplugged: calls that would make something fail, queue pairs flush, destroying works

  // One port with two RoCE v2 entries: index 0 link-local, index 1 the IPv4 address.
  static FakeDevice roce(std::string name, const std::string& ipv4);
};
Gid ipv4_gid(const std::string& ipv4);  // ::ffff:a.b.c.d

enum class FakeCall : std::uint8_t {
  kDeviceNames, kOpenDevice, kQueryDevice, kQueryPort, kQueryGids, kAllocPd, kRegMr, kCreateChannel, kCreateCq, kReqNotify, kPollCq,
  kCreateQp, kModifyToInit, kModifyToRtr, kModifyToRts, kPostSend,
};

// What becomes of one READ instead of success.
struct FakeReadFault {
  ibv_wc_status status = IBV_WC_SUCCESS;
  std::uint64_t bytes_moved = 0;  // of an unsuccessful one; a successful one moves all
  std::uint64_t flip_at = std::numeric_limits<std::uint64_t>::max();  // lowest bit of this byte arrives wrong
};

struct FakeRead {
  std::uint64_t number = 0;  // from 1, over the fabric
  std::string device;        // of the requester
  std::uint32_t qp_num = 0;
  std::uint64_t remote_address = 0;
  std::uint64_t size = 0;
};

struct FakeModify {
  std::string device;
  std::uint32_t qp_num = 0;
  int mask = 0;
  ibv_qp_attr attributes{};
  int error = 0;  // what the call returned
};

struct FakeLive {
  int contexts = 0, pds = 0, regions = 0, channels = 0, cqs = 0, qps = 0;
  std::uint64_t registered_bytes = 0;  // in whole pages, as they are locked
  bool operator==(const FakeLive&) const = default;
};

struct FakeTotals {
  std::uint64_t registrations = 0, qps_made = 0;
  std::uint64_t doorbells = 0;            // post_send calls that posted something
  std::uint64_t work_requests = 0;        // posted
  std::uint64_t doorbell_largest = 0;     // work requests
  std::uint64_t reads = 0, read_bytes = 0;  // carried out
  std::uint64_t completions = 0;          // written to completion queues
};

enum class Delivery : std::uint8_t {
  kAtPost,  // inside post_send, as soft-RoCE does
  kThread,  // by a thread of the fabric
  // A few cache lines of remote memory at each poll_cq, in random order over all READs under way: PCIe does not order reads against reads. The
  // specification's own limits hold: at most max_rd_atomic READs of a queue pair are under way, a fenced one starts when all before it are
  // complete, completions come in order. Reproducible from the seed; one thread. A wait for a completion event returns at once.
  kLines,
};

struct FakeFabric {
  std::vector<FakeDevice> devices;
  Delivery delivery = Delivery::kAtPost;
  std::uint64_t seed = 1;  // of kLines
};

class FakeVerbs final : public VerbsApi {
 public:
  explicit FakeVerbs(FakeFabric fabric);
  ~FakeVerbs() override;
  FakeVerbs(const FakeVerbs&) = delete;
  FakeVerbs& operator=(const FakeVerbs&) = delete;

  // ---- what a test does to the fabric

  // Call number `nth` from now (1: the next) and the `times` - 1 after it return `error` (errno). `device`: of that device only; empty: of any.
  void fail(FakeCall call, int error, std::uint64_t nth = 1, std::uint64_t times = 1, std::string device = {});
  void fail_no_more();
  // READ number `nth` from now that starts.
  void fail_read(std::uint64_t nth, const FakeReadFault& fault);
  // Changes a device under the feet of its users: a port down, GIDs in another order, unplugged. READs that wait are tried again.
  // `edit` must not call the fabric.
  void change(const std::string& device, const std::function<void(FakeDevice&)>& edit);
  // As a SIGKILL of the process that uses `device` now: its queue pairs fall silent and its keys are void, though the objects are still here to be
  // destroyed. What is made later on the device lives.
  void kill_owner(const std::string& device);
  // While frozen, READs are accepted and none starts (or, by lines, goes on).
  void freeze(bool frozen);
  // While held, a READ without an answer waits, as during a NIC's retries; at hold(false) it is tried again and fails if there is still none.
  void hold_timeouts(bool held);
  // Before each READ is carried out, by the thread that does so; may call the fabric, but not destroy that READ's queue pair. Not with kLines.
  void before_read(std::function<void(const FakeRead&)> hook);
  // kLines: between any two line copies. Must not call the fabric.
  void on_line(std::function<void()> step) { on_line_ = std::move(step); }

  // ---- what a test asks

  FakeLive live(const std::string& device = {}) const;
  FakeTotals totals() const;
  std::vector<FakeModify> modifies() const;  // the newest kModifiesKept
  // Calls that the specification forbids and that were refused: "RESET to INIT lacks IBV_QP_PORT". Injected failures are not among them.
  std::vector<std::string> refusals() const;
  // What the specification allows and this project does not: retry counters that wait for ever or not at all, opcodes but RDMA READ, write access to
  // the memory of others, queues that overran, objects destroyed twice or left behind.
  std::vector<std::string> breaches() const;

  // ---- VerbsApi

  Result<std::vector<std::string>> device_names() override;
  ibv_context* open_device(const std::string& name) override;
  int close_device(ibv_context* context) override;
  int query_device(ibv_context* context, ibv_device_attr* out) override;
  int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* out) override;
  ssize_t query_gid_table(ibv_context* context, ibv_gid_entry* entries, std::size_t count_max) override;
  ibv_pd* alloc_pd(ibv_context* context) override;
  int dealloc_pd(ibv_pd* pd) override;
  ibv_mr* reg_mr(ibv_pd* pd, void* begin, std::size_t size, int access) override;
  int dereg_mr(ibv_mr* mr) override;
  ibv_comp_channel* create_comp_channel(ibv_context* context) override;
  int destroy_comp_channel(ibv_comp_channel* channel) override;
  ibv_cq* create_cq(ibv_context* context, int entries, ibv_comp_channel* channel) override;
  int destroy_cq(ibv_cq* cq) override;
  int req_notify_cq(ibv_cq* cq) override;
  int take_cq_event(ibv_comp_channel* channel) override;
  int poll_cq(ibv_cq* cq, int count, ibv_wc* out) override;
  ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* attributes) override;
  int modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) override;
  int destroy_qp(ibv_qp* qp) override;
  int post_send(ibv_qp* qp, ibv_send_wr* first, ibv_send_wr** bad) override;

  static constexpr std::size_t kModifiesKept = 4096;  // and as many refusals and breaches

  // fake_verbs_objects.hpp
  struct Device;
  struct Context;
  struct Pd;
  struct Mr;
  struct Channel;
  struct Cq;
  struct WorkRequest;
  struct Qp;
  struct Line;

 private:
  using Lock = std::unique_lock<std::mutex>;
  template <typename T>
  using Shelf = std::unordered_map<const void*, std::unique_ptr<T>>;
  struct Fault {
    FakeCall call;
    int error;
    std::uint64_t nth, times;
    std::string device;
  };
  struct ReadFault {
    std::uint64_t nth;
    FakeReadFault fault;
  };
  struct Verdict;

  // fake_verbs.cpp: objects
  Device* find(const std::string& name) const;
  int injected(FakeCall call, const std::string& device);
  int usable(FakeCall call, const Device& device);  // injected, or EIO of a device that is gone
  void refuse(std::string text) { keep(refusals_, std::move(text)); }
  void breach(std::string text) { keep(breaches_, std::move(text)); }
  static void keep(std::vector<std::string>& list, std::string text);
  template <typename T>
  T* own(const Shelf<T>& shelf, const void* object, const char* what);

  // fake_verbs_qp.cpp: the state machine
  std::string check_transition(const Qp& qp, const ibv_qp_attr& attributes, int mask) const;
  std::string check_init(const Qp& qp, const ibv_qp_attr& attributes) const;
  std::string check_rtr(const Qp& qp, const ibv_qp_attr& attributes) const;
  std::string check_rts(const Qp& qp, const ibv_qp_attr& attributes) const;
  void check_project_rules(const ibv_qp_attr& attributes, int mask);
  void take_attributes(Qp& qp, const ibv_qp_attr& attributes, int mask);
  void reset(Qp& qp);
  Qp* responder_of(const Qp& qp) const;

  // fake_verbs_nic.cpp: the data path
  int enqueue(Qp& qp, const ibv_send_wr& wr);
  bool has_unfinished(const Cq& cq) const;
  void start(Lock& lock, Qp& qp);
  void start_all(Lock& lock);
  void pump(Lock& lock, Qp& qp);
  bool may_start(const Qp& qp) const;
  bool start_one(Qp& qp);
  Verdict judge(const Qp& qp, const WorkRequest& wr) const;
  const Mr* region(std::uint32_t key, bool remote) const;
  bool local_memory_fits(const Qp& qp, const WorkRequest& wr) const;
  void copy_all(const Qp& qp, WorkRequest& wr);
  void spread_lines(Qp& qp, WorkRequest& wr, std::uint32_t slot);
  void deliver_lines();
  void finish(Qp& qp);
  void complete(Qp& qp, WorkRequest& wr, ibv_wc_status status);
  void enter_error(Qp& qp);
  void drop_lines(const Qp& qp, const WorkRequest* wr);
  void fail_under_way(ibv_wc_status status, const std::function<bool(const Qp&, const WorkRequest&)>& affected);
  void forget_completions(const Qp& qp, Cq& cq);
  void run_nic();

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // work for the thread of kThread, or a queue pair that is no longer pumped
  const Delivery delivery_;
  Random random_;
  std::vector<std::unique_ptr<Device>> devices_;
  Shelf<Context> contexts_;
  Shelf<Pd> pds_;
  Shelf<Mr> mrs_;
  Shelf<Channel> channels_;
  Shelf<Cq> cqs_;
  Shelf<Qp> qps_;
  std::unordered_map<std::uint32_t, Qp*> by_number_;
  std::vector<Mr*> by_key_;  // index: key / 2 - kKeyFirst; null once deregistered, never given again
  std::uint32_t qp_number_next_ = 0x11;
  std::vector<Fault> faults_;
  std::vector<ReadFault> read_faults_;
  std::vector<Line> lines_;  // kLines: not yet copied, of every queue pair
  std::function<void()> on_line_;
  std::function<void(const FakeRead&)> before_read_;
  bool frozen_ = false, timeouts_held_ = false, stopping_ = false;
  FakeTotals totals_;
  std::vector<FakeModify> modifies_;
  std::vector<std::string> refusals_, breaches_;
  std::thread nic_;
};

}  // namespace paramwire::testing
