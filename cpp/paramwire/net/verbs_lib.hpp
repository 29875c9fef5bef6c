// libibverbs (rdma-core) as a table of functions: the real one is opened at run time, so that one build runs with and without it; tests bring
// a fake one. The only header that includes <infiniband/verbs.h>.
//
// Names, arguments and returns are those of the manual pages (ibv_open_device(3) and so on): pointers are nullptr with errno set, ints are 0 or an
// errno value, unless said. Threads: as libibverbs, any, each object for itself.
#pragma once

#include "paramwire/base/error.hpp"

#include <cstddef>
#include <cstdint>
#include <infiniband/verbs.h>
#include <memory>
#include <string>
#include <sys/types.h>
#include <vector>

namespace paramwire {

class VerbsApi {
 public:
  virtual ~VerbsApi() = default;

  // In the library's order; none is no error. errors: kUnavailable with errno (ENOSYS: this kernel has no RDMA).
  virtual Result<std::vector<std::string>> device_names() = 0;
  virtual ibv_context* open_device(const std::string& name) = 0;  // ENODEV when there is none of that name
  virtual int close_device(ibv_context* context) = 0;
  virtual int query_device(ibv_context* context, ibv_device_attr* out) = 0;
  virtual int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* out) = 0;
  // Every valid entry of every port: their number, or a negative errno value.
  virtual ssize_t query_gid_table(ibv_context* context, ibv_gid_entry* entries, std::size_t count_max) = 0;

  virtual ibv_pd* alloc_pd(ibv_context* context) = 0;
  virtual int dealloc_pd(ibv_pd* pd) = 0;
  virtual ibv_mr* reg_mr(ibv_pd* pd, void* begin, std::size_t size, int access) = 0;
  virtual int dereg_mr(ibv_mr* mr) = 0;

  virtual ibv_comp_channel* create_comp_channel(ibv_context* context) = 0;  // its descriptor does not block
  virtual int destroy_comp_channel(ibv_comp_channel* channel) = 0;
  virtual ibv_cq* create_cq(ibv_context* context, int entries, ibv_comp_channel* channel) = 0;
  virtual int destroy_cq(ibv_cq* cq) = 0;
  virtual int req_notify_cq(ibv_cq* cq) = 0;
  // Takes one event of the channel and acknowledges it. 0, or an errno value; EAGAIN when none waits, since channels do not block.
  virtual int take_cq_event(ibv_comp_channel* channel) = 0;
  virtual int poll_cq(ibv_cq* cq, int count, ibv_wc* out) = 0;    // how many came, or negative

  virtual ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* attributes) = 0;
  virtual int modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) = 0;
  virtual int destroy_qp(ibv_qp* qp) = 0;
  virtual int post_send(ibv_qp* qp, ibv_send_wr* first, ibv_send_wr** bad) = 0;
};

// The system's library. It stays in the process once it is opened, since providers leave threads and atfork handlers behind; every
// open() gives a table of the same functions.
//
// Fork: ibv_fork_init(3) is called before the first device is opened. Where the kernel copies pinned pages at a fork (Linux 5.12 and newer, rdma-
// core 35 and newer) it does nothing; elsewhere registered pages are kept from children (MADV_DONTFORK), which is why whatever this library
// registers of its own begins and ends on pages. Where it comes too late, RDMA is refused: after a fork the device would write into pages
// that this process no longer sees.
//
// What libibverbs writes to stderr, and no setting of its own turns off: at the first list of devices, a locked memory limit of 32 KiB or less (not
// to root), and drivers that a file in /etc/libibverbs.d names and that do not load, where a device has no other. Redirecting the
// process's stderr meanwhile would take other threads' words with it, so it is left.
class VerbsLibrary {
 public:
  // `name`: for tests. errors: kUnavailable with the loader's words, naming the function that the library lacks, or with why
  // ibv_fork_init failed. Any thread.
  static Result<std::shared_ptr<VerbsApi>> open(const char* name = "libibverbs.so.1");
};

}  // namespace paramwire
