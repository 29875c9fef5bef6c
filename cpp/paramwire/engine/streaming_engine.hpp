// The one Engine there is. See engine.hpp.
#pragma once

#include "paramwire/base/buffer.hpp"
#include "paramwire/client/planner.hpp"
#include "paramwire/engine/engine.hpp"

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace paramwire {

// A piece in memory, or on its way.
struct Arrival {
  bool ready = false;
  Status status;
  BlockView view;
  std::vector<ExtentCheck> checks;   // that a device makes
  std::vector<PlanesApart> planes;   // that it puts together
  Buffer own;                        // of resident pieces in copy mode
  std::span<const std::byte> bytes;
};

// Of the need's tensor.
inline Shard part_of(const Need& need, const Piece& piece) {
  return piece.row_end - piece.row_begin == need.rows ? Shard::whole() : Shard::rows(piece.row_begin, piece.row_end);
}

class StreamingEngine final : public Engine {
 public:
  static constexpr std::uint64_t kRowsBytes = 256 * 1024;  // of a batch of rows by data; see engine.cpp

  ~StreamingEngine() override;
  Status open(std::shared_ptr<Snapshot> snapshot, const Graph& graph, const EngineOptions& options);

  Result<std::span<const float>> step(std::span<const Token> tokens) override;
  Status rewind(std::uint64_t position) override { return session_->rewind(position); }
  std::uint64_t position() const override { return session_->position(); }
  Status adopt(std::shared_ptr<Snapshot> next) override;
  Status prepare(std::shared_ptr<Snapshot> next) override;
  EngineStats stats() const override;
  const Snapshot& snapshot() const override { return *snapshot_; }
  std::string description() const override;

 private:
  Status bind(const Graph& graph);
  Status open_session();
  Status open_window();
  Status open_beside();
  Status plan();
  Status choose_source();
  void prefetch();
  void let_go(std::unique_lock<std::mutex>& lock);
  // Into `target`, or as a view; of resident pieces on the host, into memory of its own.
  void fetch_piece(Snapshot& snapshot, const Piece& piece, std::span<std::byte> target, Arrival& arrival) const;
  const Need& need_of(const Piece& piece) const { return binding_->needs()[walk_needs_[piece.need]]; }
  void new_window(std::vector<bool> there);
  WeightView weight_view(const Piece& piece, const Arrival& arrival) const;
  Status run_step(std::span<const Token> tokens);
  Status supply_rows(const Pending& pending, const Need& need);
  Status supply_piece(const Pending& pending);
  Result<const Arrival*> await(std::uint64_t position);
  void retire();
  Status retire_one();

  // engine_versions.cpp
  using Identities = std::vector<std::optional<Snapshot::Identity>>;  // by piece: of those that stay
  Status check_same_model(Snapshot& next) const;
  Result<Identities> identities_of(const Snapshot& snapshot) const;
  Status fill_other(Snapshot& next);
  Status fill_piece(Snapshot& next, std::size_t index, bool same);
  Status exchange(const Identities& wanted, std::vector<bool>& there);
  void set_held(bool held);

  EngineOptions options_;
  std::shared_ptr<Snapshot> snapshot_;
  std::shared_ptr<Backend> backend_;
  bool device_ = false;                        // the backend keeps pieces in memory of its own
  std::unique_ptr<Binding> binding_;
  std::unique_ptr<Session> session_;
  Trace* trace_ = nullptr;                     // the client's
  std::vector<std::uint32_t> walk_needs_;      // binding need of each walk need
  std::vector<std::vector<std::uint64_t>> cuts_;  // by walk need, as the plan was made for
  WalkPlan plan_;
  bool views_ = false;
  bool walk_encoded_ = false;                  // some of what is walked has no bytes to view
  std::uint64_t rows_bytes_ = 0;               // of the budget, for rows by data
  bool picks_experts_ = false;                 // some of these rows are experts
  std::uint64_t decoding_ = 0;                 // of the budget, for encoded pieces on their way
  std::uint64_t planes_bytes_ = 0;             // of the largest piece whose planes a device puts together
  Buffer rows_buffer_;
  std::unique_ptr<Staging> rows_staging_;      // of a device
  std::span<std::byte> rows_;                  // one of the two
  std::uint64_t rows_supplied_ = 0;            // the session may read rows_ until it has released so many views
  Buffer ring_;                                // copy mode
  std::unique_ptr<Staging> staging_;           // the ring of a device
  std::span<std::byte> ring_bytes_;            // of one of the two

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<WalkWindow> window_;         // under mutex_, as all below
  std::map<std::uint64_t, Arrival> arrivals_;  // by walk position; node addresses are stable
  std::vector<std::map<std::uint64_t, Arrival>::node_type> retired_;  // views computed with, in walk order
  std::uint64_t retired_bytes_ = 0;
  std::vector<Arrival> resident_;              // by piece
  std::vector<Arrival> other_;                 // the same, of the second version; whoever holds prepare_mutex_, as beside_
  bool stop_ = false;
  bool walk_failed_ = false;                   // a fetch did: nothing more is fetched
  bool paused_ = false;                        // nothing is begun
  unsigned fetching_ = 0;                      // prefetch threads at work
  EngineStats stats_;
  std::vector<std::thread> threads_;

  std::uint64_t at_ = 0;                       // walk position of the next piece to supply; step()'s thread only, as below
  struct OnItsWay {
    std::uint64_t position = 0;
    std::uint64_t supplied = 0;                // free once the session has released so many
  };
  std::deque<OnItsWay> on_its_way_;            // to the device, in walk order
  std::optional<Error> failed_;

  std::mutex prepare_mutex_;                   // before mutex_
  std::unique_ptr<Staging> beside_;            // of a device: what the second version passes through, two halves
  std::uint64_t beside_turn_ = 0;              // of its halves
  unsigned current_ = 0;                       // of two sets of what stays; changed under both mutexes
  std::array<Identities, 2> held_;             // by set: what lies in it. The current one's under mutex_
  Identities identities_;                      // of snapshot_
  std::uint64_t held_bytes_max_ = 0;           // of windows before this one
};

}  // namespace paramwire
