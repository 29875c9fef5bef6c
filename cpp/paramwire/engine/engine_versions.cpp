// Another version of the model takes the place of the one that an engine computes with.
#include "paramwire/engine/streaming_engine.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace paramwire {

Status StreamingEngine::open_beside() {
  if (options_.versions == 1) return {};
  std::uint64_t largest = 0;
  for (const Piece& piece : plan_.pieces) largest = std::max(largest, piece.resident ? piece.bytes : 0);
  if (largest == 0) return {};
  PARAMWIRE_TRY(beside, backend_->allocate_staging(2 * ((largest + 63) / 64 * 64)));
  beside_ = std::move(beside);
  return {};
}

// What was planned, reserved and captured must serve `next` as well.
Status StreamingEngine::check_same_model(Snapshot& next) const {
  PARAMWIRE_CHECK(next.fetch({}));  // nothing: whether it is open
  if (views_) {
    const Piece& piece = plan_.pieces.front();
    auto view = next.view(need_of(piece).tensor, part_of(need_of(piece), piece));
    if (!view.ok() && view.error().code() == Code::kUnavailable) return std::move(view).error();
  }
  const auto differs = [&](const Need& need, std::string_view what, const auto& is, const auto& was) {
    return Error(Code::kInvalid, cat("version ", next.version(), " is not the model that this engine was opened with: ", what, " of tensor \"", need.tensor, "\" is ", is, ", and was ", was,
                                     ": open another engine for it"));
  };
  std::size_t walked = 0;
  for (const Need& need : binding_->needs()) {
    PARAMWIRE_TRY(is, next.find(need.tensor));
    PARAMWIRE_TRY(was, snapshot_->find(need.tensor));
    if (is.dtype != was.dtype) return differs(need, "the type", dtype_name(is.dtype), dtype_name(was.dtype));
    if (is.shape != was.shape) return differs(need, "the shape", is.shape, was.shape);
    // Whether a small block is encoded may change with its values: what the plan has memory for may be.
    const bool decodes = walk_encoded_ && (need.access == Access::kWhole || need.row_bytes <= kRowsBytes);
    if (is.codec != CodecId::kRaw && was.codec == CodecId::kRaw && !decodes) {
      return differs(need, "the encoding", codec_name(is.codec), "raw, for which no memory to decode was planned");
    }
    if (need.access == Access::kRowsByData) continue;
    PARAMWIRE_TRY(cuts, next.row_cuts(need.tensor));
    if (cuts != cuts_[walked]) return differs(need, "the number of blocks", cat(cuts.size(), ", or where they are cut,"), cuts_[walked].size());
    ++walked;
  }
  return {};
}

Result<StreamingEngine::Identities> StreamingEngine::identities_of(const Snapshot& snapshot) const {
  Identities out(plan_.pieces.size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    const Piece& piece = plan_.pieces[i];
    if (!piece.resident) continue;
    PARAMWIRE_TRY(identity, snapshot.identity(need_of(piece).tensor, part_of(need_of(piece), piece)));
    out[i] = identity;
  }
  return out;
}

// After a step: all that stays has been supplied, or nobody knows.
void StreamingEngine::set_held(bool held) {
  const std::lock_guard lock(mutex_);
  if (held) held_[current_] = identities_;
  else held_[current_].assign(plan_.pieces.size(), std::nullopt);
}

// ---------------------------------------------------------------- beside steps

Status StreamingEngine::prepare(std::shared_ptr<Snapshot> next) {
  const std::lock_guard preparing(prepare_mutex_);
  PARAMWIRE_CHECK(check_same_model(*next));
  return options_.versions == 1 ? Status() : fill_other(*next);
}

Status StreamingEngine::fill_other(Snapshot& next) {
  PARAMWIRE_TRY(wanted, identities_of(next));
  Identities& held = held_[1 - current_];
  std::vector<std::size_t> filled;
  const Status status = [&]() -> Status {
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (!plan_.pieces[i].resident || held[i] == wanted[i]) continue;
      held[i].reset();
      bool same = false;
      {
        const std::lock_guard lock(mutex_);
        same = held_[current_][i] == wanted[i];
      }
      filled.push_back(i);
      PARAMWIRE_CHECK(fill_piece(next, i, same));
    }
    return device_ ? session_->staged() : Status();
  }();
  if (!status.ok()) return status;
  for (const std::size_t i : filled) held[i] = wanted[i];
  return {};
}

// same: the piece that steps compute with has these bytes.
Status StreamingEngine::fill_piece(Snapshot& next, std::size_t index, bool same) {
  const Piece& piece = plan_.pieces[index];
  if (device_ && same) return session_->stage_same(index);
  std::span<std::byte> half;
  if (device_) {
    const std::size_t size = beside_->span().size() / 2;
    half = beside_->span().subspan(static_cast<std::size_t>(beside_turn_++ % 2) * size, static_cast<std::size_t>(piece.bytes));
  }
  Arrival& arrival = other_[index];
  arrival.ready = false;
  arrival.status = {};
  arrival.checks.clear();
  arrival.planes.clear();
  if (same && !views_) {
    if (arrival.own.size() == 0) {
      PARAMWIRE_TRY(own, Buffer::allocate(static_cast<std::size_t>(piece.bytes)));
      arrival.own = std::move(own);
    }
    std::memcpy(arrival.own.data(), resident_[index].bytes.data(), arrival.own.size());
    arrival.bytes = arrival.own.span();
  } else {
    fetch_piece(next, piece, half, arrival);
    PARAMWIRE_CHECK(arrival.status);
    const std::lock_guard lock(mutex_);
    stats_.bytes_fetched += piece.bytes;
    ++stats_.pieces_fetched;
  }
  arrival.ready = true;
  return device_ ? session_->stage(index, weight_view(piece, arrival)) : Status();
}

// ---------------------------------------------------------------- between steps

Status StreamingEngine::adopt(std::shared_ptr<Snapshot> next) {
  const std::lock_guard preparing(prepare_mutex_);
  PARAMWIRE_CHECK(check_same_model(*next));
  if (options_.versions == 2) PARAMWIRE_CHECK(fill_other(*next));
  PARAMWIRE_TRY(wanted, identities_of(*next));

  std::unique_lock lock(mutex_);
  paused_ = true;
  changed_.wait(lock, [&] { return fetching_ == 0; });
  std::vector<bool> there(plan_.pieces.size(), false);
  const Status exchanged = exchange(wanted, there);
  if (exchanged.ok()) {
    // What was fetched ahead is of the version before.
    arrivals_.clear();
    retired_.clear();
    retired_bytes_ = 0;
    on_its_way_.clear();
    at_ = 0;
    new_window(std::move(there));
    snapshot_ = std::move(next);
    identities_ = std::move(wanted);
    walk_failed_ = false;
    failed_.reset();
    ++stats_.versions_adopted;
  }
  paused_ = false;
  lock.unlock();
  changed_.notify_all();
  return exchanged;
}

// there: by piece, what needs no fetch in the next step. Under both mutexes.
Status StreamingEngine::exchange(const Identities& wanted, std::vector<bool>& there) {
  if (options_.versions == 2) {
    if (device_) PARAMWIRE_CHECK(session_->swap());
    std::swap(resident_, other_);
    current_ = 1 - current_;
    for (std::size_t i = 0; i < there.size(); ++i) there[i] = plan_.pieces[i].resident;
    return {};
  }
  std::vector<std::size_t> changed;
  for (std::size_t i = 0; i < there.size(); ++i) {
    if (!plan_.pieces[i].resident) continue;
    there[i] = held_[current_][i] == wanted[i];
    if (!there[i]) changed.push_back(i);
  }
  if (device_) PARAMWIRE_CHECK(session_->renew(changed));
  for (const std::size_t i : changed) {
    held_[current_][i].reset();
    resident_[i] = {};
  }
  return {};
}

}  // namespace paramwire
