#include "paramwire/codec/block.hpp"

#include "paramwire/base/crc.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/base/thread.hpp"
#include "paramwire/codec/cast.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

namespace paramwire {
namespace {

constexpr std::uint64_t kRunBytes = kChunksPerRun * kChunkBytes;

// The chunk `index` of `raw`.
template <typename Bytes>
Bytes chunk_of(Bytes raw, std::uint64_t index) {
  const auto begin = static_cast<std::size_t>(index * kChunkBytes);
  return raw.subspan(begin, std::min<std::size_t>(raw.size() - begin, kChunkBytes));
}

// Call body() in the calling thread and in up to `threads` - 1 others, no more than there are `runs`. A thread that can't be had
// is done without: the others take its runs.
template <typename Body>
void in_threads(unsigned threads, std::uint64_t runs, const Body& body) {
  std::vector<std::thread> helpers;
  for (std::uint64_t i = 1; i < std::min<std::uint64_t>(threads, runs); ++i) {
    auto helper = start_thread("pw-codec", [&body] { body(); });
    if (!helper.ok()) break;
    helpers.push_back(std::move(*helper));
  }
  body();
  for (std::thread& helper : helpers) helper.join();
}

// ---------------------------------------------------------------- encoding

// What one thread makes of one run, until it is its turn in the block.
struct Run {
  std::vector<std::byte> bytes;  // room for the worst; the first `size` count
  std::size_t size = 0;
  std::vector<EncodedChunk> chunks;
  std::uint64_t overflowed = 0;
};

class BlockEncoding {
 public:
  BlockEncoding(const CodecSpec& spec, const Codec& codec, DType dtype, std::span<const std::byte> raw, EncodedBlock& block)
      : codec_(codec), source_dtype_(dtype), casts_(spec.encoded_dtype(dtype) != dtype), raw_(raw), block_(block),
        runs_((block.raw_size + kRunBytes - 1) / kRunBytes), waiting_(static_cast<std::size_t>(runs_)) {}

  Status encode(unsigned threads) {
    in_threads(threads, runs_, [this] { work(); });
    return status_;
  }

 private:
  void work() {
    const auto encoder = codec_.encoder(block_.dtype);
    std::vector<std::byte> cast(casts_ ? kChunkBytes : 0);
    std::unique_ptr<Run> run;
    for (std::uint64_t number = next_.fetch_add(1, std::memory_order_relaxed); number < runs_; number = next_.fetch_add(1, std::memory_order_relaxed)) {
      if (!run) run = spare();
      const Status status = encode_run(number, *encoder, cast, *run);
      run = deliver(number, status, std::move(run));
    }
  }

  Status encode_run(std::uint64_t number, ChunkEncoder& encoder, std::span<std::byte> cast, Run& run) {
    const std::uint64_t first = number * kChunksPerRun;
    const std::uint64_t end = std::min(chunk_count(block_.raw_size), first + kChunksPerRun);
    run.bytes.resize(static_cast<std::size_t>(kChunksPerRun) * codec_.bound(block_.dtype, kChunkBytes));  // once
    run.chunks.clear();
    run.overflowed = 0;
    encoder.restart();
    std::size_t at = 0;
    for (std::uint64_t index = first; index < end; ++index) {
      std::span<const std::byte> chunk;
      if (casts_) {
        const auto begin = static_cast<std::size_t>(index * kChunkBytes * 2);
        const auto source = raw_.subspan(begin, std::min<std::size_t>(raw_.size() - begin, 2 * kChunkBytes));
        const auto target = cast.first(source.size() / 2);
        PARAMWIRE_TRY(overflowed, cast_elements(source_dtype_, source, block_.dtype, target));
        run.overflowed += overflowed;
        chunk = target;
      } else {
        chunk = chunk_of(raw_, index);
      }
      PARAMWIRE_TRY(size, encoder.encode(index, chunk, std::span(run.bytes).subspan(at)));
      run.chunks.push_back({static_cast<std::uint32_t>(size), crc32c(std::span(run.bytes).subspan(at, size))});
      at += size;
    }
    run.size = at;
    return {};
  }

  std::unique_ptr<Run> spare() {
    const std::lock_guard lock(mutex_);
    if (spares_.empty()) return std::make_unique<Run>();
    auto run = std::move(spares_.back());
    spares_.pop_back();
    return run;
  }

  // Put what is next in order into the block. Whoever finishes a run does it for all that waited for this one: while a thread is held
  // up, the runs behind its own wait, at worst all of the block.
  std::unique_ptr<Run> deliver(std::uint64_t number, const Status& status, std::unique_ptr<Run> run) {
    const std::lock_guard lock(mutex_);
    if (!status.ok() && status_.ok()) status_ = status;
    waiting_[static_cast<std::size_t>(number)] = std::move(run);
    for (; placed_ < runs_ && waiting_[static_cast<std::size_t>(placed_)]; ++placed_) {
      Run& done = *waiting_[static_cast<std::size_t>(placed_)];
      const auto bytes = std::span(done.bytes).first(done.size);
      block_.bytes.insert(block_.bytes.end(), bytes.begin(), bytes.end());
      block_.crc64 = crc64(bytes, block_.crc64);
      block_.chunks.insert(block_.chunks.end(), done.chunks.begin(), done.chunks.end());
      block_.overflowed += done.overflowed;
      spares_.push_back(std::move(waiting_[static_cast<std::size_t>(placed_)]));
    }
    if (spares_.empty()) return std::make_unique<Run>();
    auto next = std::move(spares_.back());
    spares_.pop_back();
    return next;
  }

  const Codec& codec_;
  const DType source_dtype_;
  const bool casts_;
  const std::span<const std::byte> raw_;
  EncodedBlock& block_;  // under mutex_ while threads run
  const std::uint64_t runs_;
  std::atomic<std::uint64_t> next_{0};
  std::mutex mutex_;
  std::uint64_t placed_ = 0;                  // under mutex_, as all below
  std::vector<std::unique_ptr<Run>> waiting_;
  std::vector<std::unique_ptr<Run>> spares_;
  Status status_;
};

Status encode_as(const CodecSpec& spec, const Codec& codec, DType dtype, std::span<const std::byte> raw, unsigned threads, EncodedBlock& block) {
  block.codec = codec.id();
  block.bytes.clear();
  block.chunks.clear();
  block.crc64 = 0;
  block.overflowed = 0;
  block.bytes.reserve(static_cast<std::size_t>(block.raw_size));
  block.chunks.reserve(static_cast<std::size_t>(chunk_count(block.raw_size)));
  return BlockEncoding(spec, codec, dtype, raw, block).encode(threads);
}

}  // namespace

Status encode_block(const CodecSpec& spec, DType dtype, std::span<const std::byte> raw, unsigned threads, EncodedBlock& block) {
  if (threads == 0) return Error(Code::kInvalid, "a block is encoded by 0 threads; at least 1");
  const std::size_t element = dtype_bits(dtype) < 8 ? 1 : dtype_bits(dtype) / 8;
  if (dtype_bits(dtype) == 0 || raw.size() % element != 0) {
    return Error(Code::kInvalid, cat(raw.size(), " bytes are no whole number of elements of ", dtype_name(dtype), " (", element, " bytes each)"));
  }
  if (spec.cast && *spec.cast != DType::kF16 && *spec.cast != DType::kBF16) {
    return Error(Code::kInvalid, cat("no cast to ", dtype_name(*spec.cast), "; f16 or bf16"));
  }
  PARAMWIRE_TRY(codec, open_codec(spec.codec));
  block.dtype = spec.encoded_dtype(dtype);
  block.raw_size = raw.size() / element * (block.dtype == dtype ? element : dtype_bits(block.dtype) / 8);
  PARAMWIRE_CHECK(encode_as(spec, *codec, dtype, raw, threads, block));
  if (codec->id() == CodecId::kRaw || block.bytes.size() < block.raw_size) return {};
  PARAMWIRE_TRY(plain, open_codec(CodecId::kRaw));
  return encode_as(spec, *plain, dtype, raw, threads, block);
}

Result<EncodedBlock> encode_block(const CodecSpec& spec, DType dtype, std::span<const std::byte> raw, unsigned threads) {
  EncodedBlock block;
  PARAMWIRE_CHECK(encode_block(spec, dtype, raw, threads, block));
  return block;
}

// ---------------------------------------------------------------- decoding

namespace {

class BlockDecoding {
 public:
  BlockDecoding(const Codec& codec, DType dtype, std::span<const std::byte> stored, std::span<const EncodedChunk> chunks,
                std::uint64_t first_chunk, std::span<std::byte> raw, StoredCheck check)
      : codec_(codec), dtype_(dtype), stored_(stored), chunks_(chunks), first_chunk_(first_chunk), raw_(raw), check_(check) {}

  // Where each run begins in `stored`, and that everything is as large as it can be.
  Status plan() {
    if (chunks_.size() != chunk_count(raw_.size())) {
      return Error(Code::kInvalid, cat(chunks_.size(), " chunks for ", raw_.size(), " raw bytes; expected ", chunk_count(raw_.size())));
    }
    std::uint64_t at = 0;
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      if (i % kChunksPerRun == 0) begins_.push_back(at);
      const std::size_t most = codec_.bound(dtype_, chunk_of(raw_, i).size());
      if (chunks_[i].stored_size > most) return corrupt(i, cat("declares ", chunks_[i].stored_size, " stored bytes; at most ", most));
      at += chunks_[i].stored_size;
    }
    if (at == stored_.size()) return {};
    return Error(Code::kCorrupt, cat("chunks ", first_chunk_, " to ", first_chunk_ + chunks_.size(), " declare ", at, " stored bytes, ", stored_.size(),
                                     " are there; fetch them again, or from another replica"));
  }

  Status decode(unsigned threads) {
    in_threads(threads, begins_.size(), [this] { work(); });
    return status_;
  }

 private:
  Error corrupt(std::size_t i, std::string_view why) const {
    return Error(Code::kCorrupt, cat("chunk ", first_chunk_ + i, " (", codec_name(codec_.id()), ", ", dtype_name(dtype_), ") ", why, "; fetch it again, or from another replica"));
  }

  void work() {
    const auto decoder = codec_.decoder(dtype_);
    for (std::size_t run = next_.fetch_add(1, std::memory_order_relaxed); run < begins_.size(); run = next_.fetch_add(1, std::memory_order_relaxed)) {
      if (Status status = decode_run(run, *decoder); !status.ok()) {
        next_.store(begins_.size(), std::memory_order_relaxed);  // no new runs
        const std::lock_guard lock(mutex_);
        // Of several the first one in the block, as far as they were found.
        if (status_.ok() || run < failed_run_) {
          status_ = std::move(status);
          failed_run_ = run;
        }
        return;
      }
    }
  }

  Status decode_run(std::size_t run, ChunkDecoder& decoder) {
    auto at = static_cast<std::size_t>(begins_[run]);
    const std::size_t first = run * kChunksPerRun;
    for (std::size_t i = first; i < std::min<std::size_t>(chunks_.size(), first + kChunksPerRun); ++i) {
      const auto frame = stored_.subspan(at, chunks_[i].stored_size);
      at += chunks_[i].stored_size;
      if (check_ == StoredCheck::kVerify) {
        const std::uint32_t found = crc32c(frame);
        if (found != chunks_[i].crc32c) return corrupt(i, cat("has stored bytes with CRC-32C ", found, ", its row says ", chunks_[i].crc32c));
      }
      PARAMWIRE_CHECK(decoder.decode(first_chunk_ + i, frame, chunk_of(raw_, i)));
    }
    return {};
  }

  const Codec& codec_;
  const DType dtype_;
  const std::span<const std::byte> stored_;
  const std::span<const EncodedChunk> chunks_;
  const std::uint64_t first_chunk_;
  const std::span<std::byte> raw_;
  const StoredCheck check_;
  std::vector<std::uint64_t> begins_;  // of runs, counted from the first chunk that is decoded
  std::atomic<std::size_t> next_{0};
  std::mutex mutex_;
  Status status_;               // under mutex_
  std::size_t failed_run_ = 0;  // under mutex_
};

}  // namespace

Status decode_block(CodecId codec, DType dtype, std::span<const std::byte> stored, std::span<const EncodedChunk> chunks,
                    std::uint64_t first_chunk, std::span<std::byte> raw, unsigned threads, StoredCheck check) {
  if (threads == 0) return Error(Code::kInvalid, "a block is decoded by 0 threads; at least 1");
  PARAMWIRE_TRY(opened, open_codec(codec));
  BlockDecoding decoding(*opened, dtype, stored, chunks, first_chunk, raw, check);
  PARAMWIRE_CHECK(decoding.plan());
  return decoding.decode(threads);
}

}  // namespace paramwire
