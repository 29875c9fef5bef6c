#include "paramwire/net/verbs_lib.hpp"

#include "paramwire/base/text.hpp"

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <mutex>

// In the header these are macros around the functions of the same names.
#undef ibv_reg_mr
#undef ibv_query_port

namespace paramwire {

namespace {

// What has no inline body in the header. decltype of a declaration links nothing.
struct Functions {
  decltype(::ibv_fork_init)* fork_init = nullptr;
  decltype(::ibv_get_device_list)* get_device_list = nullptr;
  decltype(::ibv_free_device_list)* free_device_list = nullptr;
  decltype(::ibv_get_device_name)* get_device_name = nullptr;
  decltype(::ibv_open_device)* open_device = nullptr;
  decltype(::ibv_close_device)* close_device = nullptr;
  decltype(::ibv_query_device)* query_device = nullptr;
  decltype(::ibv_query_port)* query_port = nullptr;
  decltype(::_ibv_query_gid_table)* query_gid_table = nullptr;
  decltype(::ibv_alloc_pd)* alloc_pd = nullptr;
  decltype(::ibv_dealloc_pd)* dealloc_pd = nullptr;
  decltype(::ibv_reg_mr)* reg_mr = nullptr;
  decltype(::ibv_dereg_mr)* dereg_mr = nullptr;
  decltype(::ibv_create_comp_channel)* create_comp_channel = nullptr;
  decltype(::ibv_destroy_comp_channel)* destroy_comp_channel = nullptr;
  decltype(::ibv_create_cq)* create_cq = nullptr;
  decltype(::ibv_destroy_cq)* destroy_cq = nullptr;
  decltype(::ibv_get_cq_event)* get_cq_event = nullptr;
  decltype(::ibv_ack_cq_events)* ack_cq_events = nullptr;
  decltype(::ibv_create_qp)* create_qp = nullptr;
  decltype(::ibv_modify_qp)* modify_qp = nullptr;
  decltype(::ibv_destroy_qp)* destroy_qp = nullptr;
};

// Looks functions up and remembers the first that is not there.
class Symbols {
 public:
  explicit Symbols(void* library) : library_(library) {}

  // libibverbs has most of these twice, as IBVERBS_1.0 with the structures of 2006 and as IBVERBS_1.1; dlsym(3) gives the default
  // version, which is the newer one and the one that the header declares (`nm -D`: the one with "@@").
  template <typename Function>
  void find(Function*& out, const char* name) {
    out = reinterpret_cast<Function*>(::dlsym(library_, name));
    if (out == nullptr && missing_.empty()) missing_ = name;
  }
  const std::string& missing() const noexcept { return missing_; }

 private:
  void* library_;
  std::string missing_;
};

std::string look_up(void* library, Functions& out) {
  Symbols symbols(library);
  symbols.find(out.fork_init, "ibv_fork_init");
  symbols.find(out.get_device_list, "ibv_get_device_list");
  symbols.find(out.free_device_list, "ibv_free_device_list");
  symbols.find(out.get_device_name, "ibv_get_device_name");
  symbols.find(out.open_device, "ibv_open_device");
  symbols.find(out.close_device, "ibv_close_device");
  symbols.find(out.query_device, "ibv_query_device");
  symbols.find(out.query_port, "ibv_query_port");
  symbols.find(out.query_gid_table, "_ibv_query_gid_table");
  symbols.find(out.alloc_pd, "ibv_alloc_pd");
  symbols.find(out.dealloc_pd, "ibv_dealloc_pd");
  symbols.find(out.reg_mr, "ibv_reg_mr");
  symbols.find(out.dereg_mr, "ibv_dereg_mr");
  symbols.find(out.create_comp_channel, "ibv_create_comp_channel");
  symbols.find(out.destroy_comp_channel, "ibv_destroy_comp_channel");
  symbols.find(out.create_cq, "ibv_create_cq");
  symbols.find(out.destroy_cq, "ibv_destroy_cq");
  symbols.find(out.get_cq_event, "ibv_get_cq_event");
  symbols.find(out.ack_cq_events, "ibv_ack_cq_events");
  symbols.find(out.create_qp, "ibv_create_qp");
  symbols.find(out.modify_qp, "ibv_modify_qp");
  symbols.find(out.destroy_qp, "ibv_destroy_qp");
  return symbols.missing();
}

// Of calls that give -1 and errno, or an errno value, depending on the function and the provider.
int error_of(int result) noexcept {
  if (result >= 0) return result;
  return errno != 0 ? errno : EIO;
}

class LoadedVerbs final : public VerbsApi {
 public:
  explicit LoadedVerbs(const Functions& functions) : call_(functions) {}

  Result<std::vector<std::string>> device_names() override {
    ibv_device** list = call_.get_device_list(nullptr);
    if (list == nullptr) {
      const int error = errno;
      const char* why = error == ENOSYS ? "this kernel offers no RDMA (module ib_uverbs), ibv_get_device_list" : "ibv_get_device_list";
      return errno_error(Code::kUnavailable, why, error);
    }
    std::vector<std::string> out;
    for (ibv_device** at = list; *at != nullptr; ++at) out.emplace_back(call_.get_device_name(*at));
    call_.free_device_list(list);
    return out;
  }

  ibv_context* open_device(const std::string& name) override {
    ibv_device** list = call_.get_device_list(nullptr);
    if (list == nullptr) return nullptr;
    ibv_context* out = nullptr;
    int error = ENODEV;
    for (ibv_device** at = list; *at != nullptr; ++at) {
      if (name != call_.get_device_name(*at)) continue;
      errno = 0;
      out = call_.open_device(*at);  // which keeps the device beyond the list
      error = errno != 0 ? errno : EIO;
      break;
    }
    call_.free_device_list(list);
    errno = error;
    return out;
  }

  int close_device(ibv_context* context) override { return error_of(call_.close_device(context)); }
  int query_device(ibv_context* context, ibv_device_attr* out) override { return error_of(call_.query_device(context, out)); }

  // As ___ibv_query_port() of the header: the function takes the structure of old, which ends before `port_cap_flags2`; so the
  // provider is called with the size of ours where it knows of sizes.
  int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* out) override {
    std::memset(out, 0, sizeof *out);
    // The header's verbs_get_ctx_op() in standard C++. The structure grows at its front: `sz` counts from the end.
    verbs_context* extended = ::verbs_get_ctx(context);
    const bool has = extended != nullptr && extended->sz >= sizeof *extended - offsetof(verbs_context, query_port) && extended->query_port != nullptr;
    if (has) return error_of(extended->query_port(context, port, out, sizeof *out));
    return error_of(call_.query_port(context, port, reinterpret_cast<_compat_ibv_port_attr*>(out)));
  }

  ssize_t query_gid_table(ibv_context* context, ibv_gid_entry* entries, std::size_t count_max) override {
    return call_.query_gid_table(context, entries, count_max, 0, sizeof *entries);
  }

  ibv_pd* alloc_pd(ibv_context* context) override { return call_.alloc_pd(context); }
  int dealloc_pd(ibv_pd* pd) override { return error_of(call_.dealloc_pd(pd)); }
  ibv_mr* reg_mr(ibv_pd* pd, void* begin, std::size_t size, int access) override { return call_.reg_mr(pd, begin, size, access); }
  int dereg_mr(ibv_mr* mr) override { return error_of(call_.dereg_mr(mr)); }

  ibv_comp_channel* create_comp_channel(ibv_context* context) override {
    ibv_comp_channel* out = call_.create_comp_channel(context);
    if (out == nullptr) return nullptr;
    const int flags = ::fcntl(out->fd, F_GETFL);
    if (flags < 0 || ::fcntl(out->fd, F_SETFL, flags | O_NONBLOCK) != 0) {
      const int error = errno;
      call_.destroy_comp_channel(out);
      errno = error;
      return nullptr;
    }
    return out;
  }
  int destroy_comp_channel(ibv_comp_channel* channel) override { return error_of(call_.destroy_comp_channel(channel)); }
  ibv_cq* create_cq(ibv_context* context, int entries, ibv_comp_channel* channel) override {
    return call_.create_cq(context, entries, nullptr, channel, 0);
  }
  int destroy_cq(ibv_cq* cq) override { return error_of(call_.destroy_cq(cq)); }
  int take_cq_event(ibv_comp_channel* channel) override {
    ibv_cq* cq = nullptr;
    void* unused = nullptr;
    if (call_.get_cq_event(channel, &cq, &unused) != 0) return errno != 0 ? errno : EIO;
    call_.ack_cq_events(cq, 1);
    return 0;
  }

  // The header's own inline functions: a call through the context's table, no symbol of the library.
  int req_notify_cq(ibv_cq* cq) override { return error_of(::ibv_req_notify_cq(cq, 0)); }
  int poll_cq(ibv_cq* cq, int count, ibv_wc* out) override { return ::ibv_poll_cq(cq, count, out); }
  int post_send(ibv_qp* qp, ibv_send_wr* first, ibv_send_wr** bad) override { return error_of(::ibv_post_send(qp, first, bad)); }

  ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* attributes) override { return call_.create_qp(pd, attributes); }
  int modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) override { return error_of(call_.modify_qp(qp, attributes, mask)); }
  int destroy_qp(ibv_qp* qp) override { return error_of(call_.destroy_qp(qp)); }

 private:
  const Functions call_;
};

// ibv_fork_init(3) does nothing at its second call, but has no lock of its own.
int fork_init(const Functions& call) {
  static std::mutex once_at_a_time;
  const std::lock_guard lock(once_at_a_time);
  return error_of(call.fork_init());
}

}  // namespace

Result<std::shared_ptr<VerbsApi>> VerbsLibrary::open(const char* name) {
  void* library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) {
    const char* words = ::dlerror();
    return Error(Code::kUnavailable, words != nullptr ? words : cat("dlopen ", name, " failed"));
  }
  Functions functions;
  if (const std::string missing = look_up(library, functions); !missing.empty()) {
    return Error(Code::kUnavailable, cat(name, " has no function ", missing, ": rdma-core 32 or newer is needed"));
  }
  if (const int error = fork_init(functions); error != 0) {
    // EINVAL: some other user of libibverbs was first. What it registered, and what we would, moves away from the device at a fork.
    const char* why = error == EINVAL ? "something in this process registered memory for RDMA without fork support before; set RDMAV_FORK_SAFE=1, or use "
                                        "paramwire first: ibv_fork_init"
                                      : "ibv_fork_init";
    return errno_error(Code::kUnavailable, why, error);
  }
  return std::shared_ptr<VerbsApi>(std::make_shared<LoadedVerbs>(functions));
}

}  // namespace paramwire
