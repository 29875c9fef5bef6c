#include "paramwire/server/pin_registry.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/net/pin_table.hpp"

#include <atomic>
#include <cerrno>
#include <fcntl.h>
#include <linux/memfd.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace paramwire {

namespace {

// Client processes with a pin table at once. Each costs 64 KiB and a descriptor or two here and 8 us a scan: 1024 of them make a
// publish scan last 8 ms.
constexpr std::size_t kTablesMax = 1024;
constexpr std::size_t kTableBytes = std::size_t{kPinCapacity} * sizeof(std::uint64_t);

#ifndef SO_PEERPIDFD
constexpr int SO_PEERPIDFD = 77;  // asm-generic/socket.h since Linux 6.5
#endif

// A pidfd of the process that connected. SO_PEERPIDFD cannot name another; older kernels go by number, which another process
// may have got if the first one died: its end of the connection has hung up then.
Result<Fd> process_of(int socket, std::uint32_t pid) {
  int peer = -1;
  socklen_t size = sizeof peer;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &peer, &size) == 0) return Fd(peer);
  Fd process(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0U)));
  if (!process.valid()) return errno_error(Code::kUnavailable, cat("pidfd_open of client process ", pid), errno);
  pollfd end{socket, POLLRDHUP, 0};
  if (poll(&end, 1, 0) != 0 && (end.revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0) {
    return Error(Code::kUnreachable, cat("client process ", pid, " hung up"));
  }
  return process;
}

}  // namespace

PinRegistry::~PinRegistry() {
  for (Table& table : tables_) unmap(table);
}

void PinRegistry::unmap(Table& table) noexcept { munmap(table.words, kTableBytes); }

Result<PinRegistry::Table> PinRegistry::make_table(std::uint32_t pid, Fd process) {
  const auto failed = [](std::string_view step) { return errno_error(Code::kUnavailable, cat("pin table: ", step), errno); };
  Table table;
  table.pid = pid;
  table.process = std::move(process);
  table.memory = Fd(memfd_create("paramwire-pins", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!table.memory.valid()) return failed("memfd_create");
  if (fallocate(table.memory.get(), 0, 0, static_cast<off_t>(kTableBytes)) != 0) return failed("fallocate");
  // Clients write into it, so it is sealed in size only.
  if (fcntl(table.memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return failed("F_ADD_SEALS");
  void* base = mmap(nullptr, kTableBytes, PROT_READ, MAP_SHARED, table.memory.get(), 0);
  if (base == MAP_FAILED) return failed("mmap");
  madvise(base, kTableBytes, MADV_DONTFORK);
  table.words = static_cast<std::uint64_t*>(base);
  return table;
}

Result<DescriptorSource::Pins> PinRegistry::pins(std::uint64_t connection) {
  const auto socket = sockets_.find(connection);
  if (socket == sockets_.end()) return Error(Code::kUnavailable, "views need a unix socket to the server");
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (getsockopt(socket->second, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0 || credentials.pid <= 0) {
    return Error(Code::kUnavailable, "the client's process is not visible here (another PID namespace): views need one that is");
  }
  drop_dead();  // what is left under this pid is this very process
  const auto pid = static_cast<std::uint32_t>(credentials.pid);
  for (const Table& table : tables_) {
    if (table.pid == pid) return Pins{table.memory.get(), kPinCapacity};
  }
  if (tables_.size() >= kTablesMax) {
    return Error(Code::kBackpressure, cat(tables_.size(), " client processes have pin tables, the limit: fetch into buffers instead of views"));
  }
  PARAMWIRE_TRY(process, process_of(socket->second, pid));
  PARAMWIRE_TRY(table, make_table(pid, std::move(process)));
  tables_.push_back(std::move(table));
  return Pins{tables_.back().memory.get(), kPinCapacity};
}

void PinRegistry::drop_dead() {
  std::vector<pollfd> processes;
  processes.reserve(tables_.size());
  for (const Table& table : tables_) processes.push_back({table.process.get(), POLLIN, 0});
  if (processes.empty() || poll(processes.data(), static_cast<nfds_t>(processes.size()), 0) <= 0) return;
  std::size_t i = 0;
  std::erase_if(tables_, [&](Table& table) {
    const bool dead = (processes[i++].revents & POLLIN) != 0;
    if (dead) unmap(table);
    return dead;
  });
}

void PinRegistry::collect(std::vector<PinnedWord>& out) {
  drop_dead();
  for (const Table& table : tables_) {
    for (std::uint32_t i = 0; i < kPinCapacity; ++i) {
      // Acquire pairs with the client's release of a word: its reads of the bytes are over.
      const std::uint64_t word = std::atomic_ref(table.words[i]).load(std::memory_order_acquire);
      if (word != 0) out.push_back({word, table.pid});
    }
  }
}

}  // namespace paramwire
