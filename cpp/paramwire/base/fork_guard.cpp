#include "paramwire/base/fork_guard.hpp"

#include "paramwire/base/text.hpp"

#include <sys/mman.h>
#include <unistd.h>

namespace paramwire {

namespace {
constexpr std::size_t kPage = 4096;
}

ForkGuard::ForkGuard() noexcept : pid_(getpid()) {
  void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return;
  if (madvise(page, kPage, MADV_WIPEONFORK) != 0) {
    munmap(page, kPage);
    return;
  }
  *static_cast<unsigned char*>(page) = 1;
  mark_ = static_cast<const unsigned char*>(page);
}

ForkGuard::~ForkGuard() {
  if (mark_ != nullptr) munmap(const_cast<unsigned char*>(mark_), kPage);
}

bool ForkGuard::in_child() const noexcept { return mark_ != nullptr ? *mark_ == 0 : getpid() != pid_; }

Status ForkGuard::check(std::string_view what) const {
  if (!in_child()) return {};
  return Error(Code::kInvalid, cat(what, ": handle used after fork (made in process ", pid_, ", this is ", getpid(), "): connect again in the child"));
}

}  // namespace paramwire
