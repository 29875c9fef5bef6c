// Pin tables of the client processes on this host: made and sealed here, mapped by both sides, read by the store's scan.
//
// One table a process, shared by all its links: words are claimed by compare-and-set, so links need not know of each other,
// and a client that reconnects for ever does not make tables for ever. A table goes when its process is dead, which a pidfd
// tells (pidfd_open(2)): a closed connection is not death, its views may live on. Caller locks (the server's mutex).
#pragma once

#include "paramwire/base/socket.hpp"
#include "paramwire/server/handlers.hpp"
#include "paramwire/store/block_store.hpp"

#include <cstdint>
#include <list>
#include <unordered_map>
#include <vector>

namespace paramwire {

class PinRegistry final : public PinSource, public DescriptorSource {
 public:
  PinRegistry() = default;
  ~PinRegistry() override;
  PinRegistry(const PinRegistry&) = delete;
  PinRegistry& operator=(const PinRegistry&) = delete;

  // The unix connection `connection` is open on `socket`, which must stay until drop_connection.
  void add_connection(std::uint64_t connection, int socket) { sockets_[connection] = socket; }
  void drop_connection(std::uint64_t connection) { sockets_.erase(connection); }

  // errors: kUnavailable when the kernel can't tell the process or make the table; kBackpressure at kTablesMax.
  Result<Pins> pins(std::uint64_t connection) override;
  // All words that are not zero, of the processes that live.
  void collect(std::vector<PinnedWord>& out) override;
  // Lets go of the tables of processes that are dead. `pins` and `collect` begin with it; the server's tick calls it so that
  // dead clients cost no memory and descriptors until the next of these.
  void drop_dead();
  std::size_t tables() const noexcept { return tables_.size(); }

 private:
  struct Table {
    std::uint32_t pid = 0;
    Fd process;  // pidfd: readable once the process is dead
    Fd memory;
    std::uint64_t* words = nullptr;
  };
  static Result<Table> make_table(std::uint32_t pid, Fd process);
  static void unmap(Table& table) noexcept;

  std::unordered_map<std::uint64_t, int> sockets_;
  std::list<Table> tables_;
};

}  // namespace paramwire
