#include "paramwire/client/encoded_reads.hpp"

#include "paramwire/base/buffer.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/base/thread.hpp"
#include "paramwire/wire/message.hpp"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

namespace paramwire {

namespace {

// Stored bytes of one round of reads: decoding them takes a third of a millisecond, beside which a round trip on a host or in a rack is little, and a
// reader under a memory budget has room for two. Larger ones gain over long paths only.
constexpr std::uint64_t kPieceBytes = std::uint64_t{1} << 20;
// With the rest of a frame before them.
constexpr std::uint64_t kRoundBytes = kPieceBytes + 2 * kChunkBytes;
// For fetches of a few rows.
constexpr std::uint64_t kSmallBytes = 256 * 1024;
// Stored size up to which a block is read whole: a look at its index first costs a round trip, as much as this takes at 10 GB/s.
constexpr std::uint64_t kWholeBytes = std::uint64_t{512} << 10;
// Chunks of one hand-over: half a millisecond of decoding. A decoder builds its tables once for as many.
constexpr std::uint64_t kJobChunks = 16;
// Raw bytes from which threads are started: they cost about 30 us each.
constexpr std::uint64_t kThreadsFrom = std::uint64_t{1} << 20;

std::uint64_t key_of(const ManifestEntry& entry) { return entry.crc64 * 0x9e3779b97f4a7c15U ^ entry.id.value; }

std::uint64_t chunk_size(const ManifestEntry& entry, std::uint64_t chunk) { return std::min(kChunkBytes, entry.raw_size - chunk * kChunkBytes); }

// One item on its way.
struct Stream {
  BlockRead* item = nullptr;
  std::shared_ptr<const ChunkOffsets> offsets;  // nullptr: the block is read whole, its index with it
  std::uint64_t chunk = 0, chunk_end = 0;       // still to be decoded
  std::uint64_t at = 0, end = 0;                // stored bytes still to be read; `at` is a multiple of an extent
  std::vector<std::byte> carry;                 // stored bytes before `at`: the front of a frame
  bool failed = false;
};

// Chunks that lie one after the other in memory of a round.
struct Job {
  BlockRead* item = nullptr;
  std::shared_ptr<const ChunkOffsets> offsets;
  std::uint64_t chunk = 0, count = 0;
  const std::byte* frames = nullptr;
  std::size_t* pending = nullptr;  // of its round
};

// What one thread decodes with.
class Decoders {
 public:
  Status run(const Job& job) {
    const BlockRead& read = *job.item;
    PARAMWIRE_TRY(decoder, find(read.entry));
    const std::byte* frame = job.frames;
    for (std::uint64_t chunk = job.chunk; chunk < job.chunk + job.count; ++chunk) {
      const auto at = static_cast<std::size_t>(chunk);
      const auto stored = static_cast<std::size_t>((*job.offsets)[at + 1] - (*job.offsets)[at]);
      const auto size = static_cast<std::size_t>(chunk_size(read.entry, chunk));
      const std::uint64_t begin = chunk * kChunkBytes;
      const std::uint64_t from = std::max(begin, read.range.offset);
      const std::uint64_t to = std::min(begin + size, read.range.offset + read.range.size);
      const auto wanted = read.target.subspan(static_cast<std::size_t>(from - read.range.offset), static_cast<std::size_t>(to - from));
      if (wanted.size() == size && !read.checks.empty()) {
        PARAMWIRE_TRY(apart, decoder->decode_apart(chunk, {frame, stored}, wanted));
        const auto number = static_cast<std::size_t>(chunk - chunk_count(read.range.offset));
        read.checks[number] = {from - read.range.offset, static_cast<std::uint32_t>(size), apart.crc32c};
        read.planes[number] = {from - read.range.offset, apart.planes ? static_cast<std::uint32_t>(size) : 0};
      } else if (wanted.size() == size) {
        PARAMWIRE_CHECK(decoder->decode(chunk, {frame, stored}, wanted));
      } else {  // at an edge of the range
        edge_.resize(static_cast<std::size_t>(kChunkBytes));
        PARAMWIRE_CHECK(decoder->decode(chunk, {frame, stored}, std::span(edge_).first(size)));
        std::memcpy(wanted.data(), edge_.data() + (from - begin), wanted.size());
      }
      frame += stored;
    }
    return {};
  }

 private:
  struct Known {
    CodecId codec;
    DType dtype;
    std::unique_ptr<ChunkDecoder> decoder;
  };
  Result<ChunkDecoder*> find(const ManifestEntry& entry) {
    for (const Known& known : known_) {
      if (known.codec == entry.codec && known.dtype == entry.dtype) return known.decoder.get();
    }
    PARAMWIRE_TRY(codec, open_codec(entry.codec));
    known_.push_back({entry.codec, entry.dtype, codec->decoder(entry.dtype)});
    return known_.back().decoder.get();
  }

  std::vector<Known> known_;
  std::vector<std::byte> edge_;
};

struct Round {
  Buffer memory;
  std::uint64_t used = 0;
  std::vector<BlockRead> reads;
  std::vector<Stream*> streams;  // of each read
  std::size_t pending = 0;       // jobs that read `memory`; under the team's lock
};

// Jobs, and the threads that do them. The caller's thread helps where it would wait.
class DecodeTeam {
 public:
  // `decoders`: of the caller's thread, then one for each of the team's.
  explicit DecodeTeam(std::deque<Decoders>& decoders) : decoders_(decoders) {}
  ~DecodeTeam() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Fewer where the system gives no more.
  void start(unsigned threads) {
    while (decoders_.size() < threads + std::size_t{1}) decoders_.emplace_back();
    for (unsigned i = 0; i < threads; ++i) {
      auto thread = start_thread("pw-decode", [this, &decoders = decoders_[i + std::size_t{1}]] { loop(decoders); });
      if (!thread.ok()) return;
      threads_.push_back(std::move(*thread));
    }
  }

  void submit(Job job) {
    {
      const std::lock_guard lock(mutex_);
      ++*job.pending;
      jobs_.push_back(std::move(job));
    }
    wake_.notify_one();
  }

  // Until no job of that round is left.
  void finish(const std::size_t& pending) {
    std::unique_lock lock(mutex_);
    while (pending > 0) {
      if (!jobs_.empty()) work(lock, decoders_.front());
      else done_.wait(lock);
    }
  }

  // The first error of an item stays.
  void fail(BlockRead& item, const Error& error) {
    const std::lock_guard lock(mutex_);
    note(item, error);
  }

 private:
  static void note(BlockRead& item, const Error& error) {
    if (item.result.ok()) item.result = error;
  }
  void work(std::unique_lock<std::mutex>& lock, Decoders& decoders) {
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    const Status status = decoders.run(job);
    lock.lock();
    if (!status.ok()) {
      const ManifestEntry& entry = job.item->entry;
      note(*job.item, Error(status.error().code(), cat("block ", entry.to_string(), " at version ", entry.version, ": ", status.error().message())));
    }
    if (--*job.pending == 0) done_.notify_all();
  }
  void loop(Decoders& decoders) {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return over_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      work(lock, decoders);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<Job> jobs_;
  std::vector<std::thread> threads_;
  std::deque<Decoders>& decoders_;
  bool over_ = false;
};

}  // namespace

struct DecodeBenches::Bench {
  std::array<Round, 2> rounds;
  std::deque<Decoders> decoders{1};
};

namespace {

class Reader {
 public:
  Reader(Link& link, ChunkIndexes& indexes, DecodeBenches::Bench& bench, Micros deadline)
      : link_(link), indexes_(indexes), deadline_(deadline), rounds_(bench.rounds), team_(bench.decoders) {}

  void run(std::span<BlockRead* const> batch, unsigned threads) {
    open(batch);
    std::uint64_t raw = 0;
    for (const Stream& stream : streams_) raw += stream.item->range.size;
    if (raw >= kThreadsFrom) team_.start(static_cast<unsigned>(std::min<std::uint64_t>(threads, raw / kThreadsFrom)));
    for (std::size_t turn = 0; next_ < streams_.size(); ++turn) {
      Round& round = rounds_[turn % rounds_.size()];
      team_.finish(round.pending);
      if (const Status filled = fill(round); !filled.ok()) {
        for (; next_ < streams_.size(); ++next_) team_.fail(*streams_[next_].item, filled.error());
        break;
      }
      if (round.reads.empty()) break;
      link_.read(round.reads, deadline_);
      for (std::size_t i = 0; i < round.reads.size(); ++i) take(round, i);
    }
    for (const Round& round : rounds_) team_.finish(round.pending);
  }

 private:
  // Blocks that are read whole: small ones, and those whose extent table no DATA can carry beside a part of them.
  static bool whole(const ManifestEntry& entry) {
    return entry.stored_size <= kWholeBytes || extent_count(entry.stored_size) * sizeof(ExtentRow) > kMaxTableBytes;
  }

  void open(std::span<BlockRead* const> batch) {
    std::vector<BlockRead> fronts;
    std::vector<Stream*> waiting;
    std::vector<std::vector<std::byte>> bytes;
    streams_.reserve(batch.size());
    for (BlockRead* item : batch) {
      item->result = {};
      if (item->range.size == 0) continue;
      Stream& stream = streams_.emplace_back();
      stream.item = item;
      stream.chunk = item->range.offset / kChunkBytes;
      stream.chunk_end = chunk_count(item->range.offset + item->range.size);
      stream.end = item->entry.stored_size;
      const bool all = stream.chunk == 0 && stream.chunk_end == chunk_count(item->entry.raw_size);
      if (all && whole(item->entry)) continue;
      stream.offsets = indexes_.find(item->entry);
      if (stream.offsets == nullptr && !whole(item->entry)) waiting.push_back(&stream);
    }
    bytes.reserve(waiting.size());
    for (const Stream* stream : waiting) {
      const std::uint64_t size = chunk_index_bytes(stream->item->entry.raw_size);
      bytes.emplace_back(static_cast<std::size_t>(size));
      fronts.push_back(BlockRead{stream->item->entry, stream->item->locator, {0, size}, bytes.back(), {}});
    }
    if (!fronts.empty()) link_.read(fronts, deadline_);
    for (std::size_t i = 0; i < fronts.size(); ++i) {
      if (fronts[i].result.ok()) {
        waiting[i]->offsets = index_of(*waiting[i]->item, fronts[i].target);
      } else {
        waiting[i]->item->result = fronts[i].result;
      }
    }
    for (Stream& stream : streams_) {
      stream.failed = !stream.item->result.ok();
      if (stream.failed || stream.offsets == nullptr) continue;
      stream.at = (*stream.offsets)[static_cast<std::size_t>(stream.chunk)] / kExtentBytes * kExtentBytes;
      const std::uint64_t last = (*stream.offsets)[static_cast<std::size_t>(stream.chunk_end)];
      stream.end = std::min(stream.end, extent_count(last) * kExtentBytes);
    }
  }

  // nullptr, and the item has its error.
  std::shared_ptr<const ChunkOffsets> index_of(BlockRead& item, std::span<const std::byte> front) {
    auto offsets = read_chunk_index(item.entry.codec, item.entry.dtype, item.entry.raw_size, item.entry.stored_size, front);
    if (!offsets.ok()) {
      team_.fail(item, Error(offsets.error().code(), cat("block ", item.entry.to_string(), " at version ", item.entry.version, ": ", offsets.error().message())));
      return nullptr;
    }
    auto out = std::make_shared<const ChunkOffsets>(std::move(*offsets));
    indexes_.keep(item.entry, out);
    return out;
  }

  // Memory that what is left to read would take, rests of frames before it included; more than kSmallBytes are not told apart.
  std::uint64_t left() const {
    std::uint64_t bytes = 0;
    for (std::size_t i = next_; i < streams_.size(); ++i) {
      const Stream& stream = streams_[i];
      if (!stream.failed) bytes += (stream.carry.size() + stream.end - stream.at + 63) / 64 * 64;
      if (bytes > kSmallBytes) break;
    }
    return bytes;
  }

  // What goes into the round's memory: the rest of the stream under way, and as many more as have room.
  Status fill(Round& round) {
    round.used = 0;
    round.reads.clear();
    round.streams.clear();
    for (; next_ < streams_.size(); ++next_) {
      Stream& stream = streams_[next_];
      if (stream.failed) continue;
      std::uint64_t room = round.memory.size() - round.used;
      std::uint64_t size = stream.end - stream.at;
      if (round.reads.empty()) {
        const std::uint64_t usual = left() <= kSmallBytes ? kSmallBytes : kRoundBytes;
        const std::uint64_t wanted = std::max(usual, stream.offsets == nullptr ? size : 0);
        if (round.memory.size() < wanted) {
          PARAMWIRE_TRY(memory, Buffer::allocate(static_cast<std::size_t>(wanted)));
          round.memory = std::move(memory);
        }
        room = round.memory.size();
      }
      const std::uint64_t front = stream.carry.size();
      if (front + size > room) {
        if (stream.offsets == nullptr || front + kExtentBytes > room) return {};
        size = (room - front) / kExtentBytes * kExtentBytes;
      }
      const auto place = round.memory.span().subspan(static_cast<std::size_t>(round.used), static_cast<std::size_t>(front + size));
      std::copy(stream.carry.begin(), stream.carry.end(), place.begin());
      round.reads.push_back(BlockRead{stream.item->entry, stream.item->locator, {stream.at, size}, place.subspan(static_cast<std::size_t>(front)), {}});
      round.streams.push_back(&stream);
      round.used = std::min<std::uint64_t>(round.memory.size(), (round.used + place.size() + 63) / 64 * 64);
      stream.at += size;
      if (stream.at < stream.end) return {};
    }
    return {};
  }

  // What arrived by that read goes to be decoded, but for the front of a frame that is not whole.
  void take(Round& round, std::size_t index) {
    const BlockRead& read = round.reads[index];
    Stream& stream = *round.streams[index];
    if (read.result.ok() && stream.offsets == nullptr) stream.offsets = index_of(*stream.item, read.target);
    if (!read.result.ok()) team_.fail(*stream.item, read.result.error());
    if (!read.result.ok() || stream.offsets == nullptr) {
      stop(stream);
      return;
    }
    const ChunkOffsets& offsets = *stream.offsets;
    const std::uint64_t end = read.range.offset + read.range.size;
    const std::uint64_t begin = read.range.offset - stream.carry.size();
    const std::byte* bytes = read.target.data() - stream.carry.size();
    while (stream.chunk < stream.chunk_end && offsets[static_cast<std::size_t>(stream.chunk) + 1] <= end) {
      Job job{stream.item, stream.offsets, stream.chunk, 0, bytes + (offsets[static_cast<std::size_t>(stream.chunk)] - begin), &round.pending};
      while (job.count < kJobChunks && stream.chunk < stream.chunk_end && offsets[static_cast<std::size_t>(stream.chunk) + 1] <= end) {
        ++job.count;
        ++stream.chunk;
      }
      team_.submit(std::move(job));
    }
    if (stream.chunk == stream.chunk_end) return;
    const std::byte* rest = bytes + (offsets[static_cast<std::size_t>(stream.chunk)] - begin);
    stream.carry.assign(rest, bytes + (end - begin));
  }

  void stop(Stream& stream) {
    stream.failed = true;
    stream.at = stream.end;
  }

  Link& link_;
  ChunkIndexes& indexes_;
  Micros deadline_;
  std::vector<Stream> streams_;
  std::size_t next_ = 0;  // the first stream that has something left to read
  std::array<Round, 2>& rounds_;
  DecodeTeam team_;       // ends before what its jobs read
};

}  // namespace

std::size_t whole_chunks(const BlockRead& read) noexcept {
  const std::uint64_t end = read.range.offset + read.range.size, first = chunk_count(read.range.offset);
  const std::uint64_t last = end == read.entry.raw_size ? chunk_count(end) : end / kChunkBytes;
  return static_cast<std::size_t>(last - std::min(first, last));
}

std::shared_ptr<const ChunkOffsets> ChunkIndexes::find(const ManifestEntry& entry) {
  const std::uint64_t key = key_of(entry);
  const std::lock_guard lock(mutex_);
  for (auto it = kept_.begin(); it != kept_.end(); ++it) {
    if (it->key != key) continue;
    kept_.splice(kept_.begin(), kept_, it);
    return kept_.front().offsets;
  }
  return nullptr;
}

void ChunkIndexes::keep(const ManifestEntry& entry, std::shared_ptr<const ChunkOffsets> offsets) {
  const std::lock_guard lock(mutex_);
  bytes_ += offsets->size() * sizeof(std::uint64_t);
  kept_.push_front({key_of(entry), std::move(offsets)});
  while (kept_.size() > 1 && bytes_ > kBytesMax) {
    bytes_ -= kept_.back().offsets->size() * sizeof(std::uint64_t);
    kept_.pop_back();
  }
}

DecodeBenches::DecodeBenches() = default;
DecodeBenches::~DecodeBenches() = default;

std::unique_ptr<DecodeBenches::Bench> DecodeBenches::take() {
  const std::lock_guard lock(mutex_);
  if (idle_.empty()) return std::make_unique<Bench>();
  auto bench = std::move(idle_.back());
  idle_.pop_back();
  return bench;
}

std::uint64_t DecodeBenches::bytes() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t bytes = 0;
  for (const auto& bench : idle_) {
    for (const Round& round : bench->rounds) bytes += round.memory.size();
  }
  return bytes;
}

void DecodeBenches::give_back(std::unique_ptr<Bench> bench) {
  for (Round& round : bench->rounds) {
    if (round.memory.size() > kRoundBytes) round.memory = {};  // of a block that had to be read whole
  }
  const std::lock_guard lock(mutex_);
  if (idle_.size() < kKept) idle_.push_back(std::move(bench));
}

void read_encoded(Link& link, std::span<BlockRead* const> batch, ChunkIndexes& indexes, DecodeBenches& benches, unsigned threads, DecodeCounts& counts, Micros deadline) {
  auto bench = benches.take();
  Reader(link, indexes, *bench, deadline).run(batch, threads);
  benches.give_back(std::move(bench));
  for (const BlockRead* item : batch) {
    if (!item->result.ok()) continue;
    const double part = static_cast<double>(item->range.size) / static_cast<double>(item->entry.raw_size);  // more than it is stored in
    counts.stored_bytes += static_cast<std::uint64_t>(part * static_cast<double>(item->entry.stored_size));
    counts.raw_bytes += item->range.size;
  }
}

}  // namespace paramwire
