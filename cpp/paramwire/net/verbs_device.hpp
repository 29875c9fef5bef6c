// An opened RDMA device and what is made on it: registered memory, and queue pairs of reliable connections (RC) that read. No verbs header needed.
//
// Everything keeps the device, and the device its library, by shared ownership; each is undone by its destructor. Errors name device, call, errno,
// the limit that it hit and what to do. Any thread may make them; one object is one thread's at a time. In the child of a fork the destructors do
// nothing: it shares the parent's file of the device, and would undo the parent's.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/base/fork_guard.hpp"
#include "paramwire/net/verbs_route.hpp"
#include "paramwire/wire/verbs_message.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

struct ibv_comp_channel;
struct ibv_context;
struct ibv_cq;
struct ibv_mr;
struct ibv_pd;
struct ibv_qp;

namespace paramwire {

class VerbsApi;

class VerbsDevice {
 public:
  // errors: kUnavailable: it can't be opened.
  static Result<std::shared_ptr<VerbsDevice>> open(std::shared_ptr<VerbsApi> api, const std::string& name);
  ~VerbsDevice();
  VerbsDevice(const VerbsDevice&) = delete;
  VerbsDevice& operator=(const VerbsDevice&) = delete;

  const std::string& name() const noexcept { return name_; }
  VerbsApi& api() const noexcept { return *api_; }
  ibv_context* context() const noexcept { return context_; }
  ibv_pd* domain() const noexcept { return domain_; }
  bool in_child() const noexcept { return guard_.in_child(); }

 private:
  VerbsDevice(std::shared_ptr<VerbsApi> api, std::string name) : api_(std::move(api)), name_(std::move(name)) {}

  ForkGuard guard_;
  std::shared_ptr<VerbsApi> api_;
  std::string name_;
  ibv_context* context_ = nullptr;
  ibv_pd* domain_ = nullptr;  // one a device: keys are good for its queue pairs only
};

// Memory that the device may reach. Whoever owns the bytes keeps them until this is gone.
class VerbsMemory {
 public:
  // What the device may do with it: our READs land in kLocal; peers READ from kRemoteRead and can do nothing else.
  enum class Access : std::uint8_t { kLocal, kRemoteRead };
  // errors: kUnavailable: the memory can't be registered (of a file, of a device, not mapped); kBackpressure naming RLIMIT_MEMLOCK, or the
  //         device's own limit.
  static Result<std::unique_ptr<VerbsMemory>> create(std::shared_ptr<VerbsDevice> device, std::span<std::byte> bytes, Access access);
  ~VerbsMemory();
  VerbsMemory(const VerbsMemory&) = delete;
  VerbsMemory& operator=(const VerbsMemory&) = delete;

  std::uint32_t local_key() const noexcept;
  std::uint32_t remote_key() const noexcept;
  std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  VerbsMemory(std::shared_ptr<VerbsDevice> device, ibv_mr* region, std::span<std::byte> bytes) : device_(std::move(device)), region_(region), bytes_(bytes) {}
  std::shared_ptr<VerbsDevice> device_;
  ibv_mr* region_;
  std::span<std::byte> bytes_;
};

struct VerbsRead {
  std::uint64_t remote = 0;    // address at the peer
  std::uint32_t remote_key = 0;
  std::uint32_t local_key = 0;
  std::byte* into = nullptr;
  std::uint32_t size = 0;
};

// Why a work request failed: enum ibv_wc_status of the specification.
struct VerbsFailure {
  int status = 0;
  std::string_view name;       // "transport retry counter exceeded"
  std::string_view hint;       // what it mostly means, and what to do
};
VerbsFailure verbs_failure(int status) noexcept;

// One end of a reliable connection. It reads, or is read from; nothing else is ever posted, so no end needs receives, and receiver-not-ready
// can't happen. Once a read failed the queue pair is in error, for good.
class VerbsQueue {
 public:
  struct Options {
    std::uint32_t depth = 64;   // reads posted and not seen complete; 0: is only read from
    std::uint8_t reads = 16;    // on the wire at once; more than the device can is cut
  };
  // errors: kUnavailable, kBackpressure as VerbsMemory::create.
  static Result<std::unique_ptr<VerbsQueue>> create(std::shared_ptr<VerbsDevice> device, const VerbsChoice& choice, const Options& options);
  ~VerbsQueue();
  VerbsQueue(const VerbsQueue&) = delete;
  VerbsQueue& operator=(const VerbsQueue&) = delete;

  // To be told to the other end.
  const VerbsEnd& end() const noexcept { return end_; }
  const VerbsChoice& choice() const noexcept { return choice_; }
  const VerbsDevice& device() const noexcept { return *device_; }
  // Ready to send and to be read from. mtu and reads of `remote` are what both ends agreed on.
  // errors: kUnavailable naming the step, the GID and errno: a GID that is gone, a port that is down, no route.
  Status connect(const VerbsEnd& remote);

  // One doorbell; the last is signalled. At most depth - outstanding() of them. What was posted may write until it is seen complete, or this
  // queue is gone. errors: kUnreachable: the queue pair is in error.
  Status post(std::span<const VerbsRead> reads);
  std::size_t outstanding() const noexcept { return outstanding_; }
  // How many of the oldest have completed since the last call. errors: kUnreachable with the status's name: `failed_status` is set.
  Result<std::size_t> poll();
  int failed_status() const noexcept { return failed_; }
  // Before sleeping on fd(): the next completion makes it readable. What came before shows in one more poll().
  Status arm();
  int fd() const noexcept;

 private:
  VerbsQueue(std::shared_ptr<VerbsDevice> device, const VerbsChoice& choice, const Options& options) : device_(std::move(device)), choice_(choice), options_(options) {}
  Error failure(std::string_view call, int error, std::uint64_t bytes = 0) const;

  std::shared_ptr<VerbsDevice> device_;
  VerbsChoice choice_;
  Options options_;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* completions_ = nullptr;
  ibv_qp* pair_ = nullptr;
  VerbsEnd end_;
  std::vector<std::uint32_t> doorbells_;  // reads of each, a ring
  std::size_t first_doorbell_ = 0, doorbell_count_ = 0;
  std::size_t outstanding_ = 0;
  int failed_ = 0;
};

}  // namespace paramwire
