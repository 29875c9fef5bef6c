// Tells whether this process is still the one that made the object: handles with sockets, threads and shared pages must not
// be used by the child of a fork.
//
// One page that the kernel gives to a child zeroed (MADV_WIPEONFORK, Linux 4.14, madvise(2)): the test is one load, while
// getpid(2) is a system call. Where the kernel can't, getpid is compared. Any thread.
#pragma once

#include "paramwire/base/error.hpp"

#include <string_view>
#include <sys/types.h>

namespace paramwire {

class ForkGuard {
 public:
  ForkGuard() noexcept;
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  bool in_child() const noexcept;
  // errors: kInvalid "handle used after fork" naming `what`.
  Status check(std::string_view what) const;

 private:
  const volatile unsigned char* mark_ = nullptr;  // non-zero in the process that made it
  pid_t pid_;
};

}  // namespace paramwire
