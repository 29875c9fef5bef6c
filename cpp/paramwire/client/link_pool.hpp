// Links of one transport to one server, lent to one thread at a time.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/net/transport.hpp"

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace paramwire {

// Any thread. Links are opened when wanted; broken ones and those of an earlier generation are dropped when they come back.
class LinkPool {
 public:
  using Open = std::function<Result<std::unique_ptr<Link>>(Micros deadline)>;
  // `links_max` bounds connections and mappings: threads beyond it wait their turn.
  LinkPool(Open open, std::size_t links_max) : open_(std::move(open)), links_max_(links_max) {}

  class Loan {
   public:
    Loan(LinkPool& pool, std::unique_ptr<Link> link, std::uint64_t generation) : pool_(&pool), link_(std::move(link)), generation_(generation) {}
    Loan(Loan&& other) noexcept = default;
    Loan& operator=(Loan&& other) = delete;
    ~Loan() {
      if (link_) pool_->take_back(std::move(link_), generation_);
    }
    Link& operator*() const noexcept { return *link_; }
    Link* operator->() const noexcept { return link_.get(); }

   private:
    LinkPool* pool_;
    std::unique_ptr<Link> link_;
    std::uint64_t generation_;
  };

  // errors: of opening; kTimeout when all links are lent until `deadline`.
  Result<Loan> borrow(Micros deadline);
  // The server is another one now: no link from before is lent again.
  void renew();
  // Nothing is kept any more: idle links end now, lent ones when they come back. Counters stay.
  void close();
  // Sums over all links, living and dropped; lent ones count what they had done when they were last here. So sums never fall.
  LinkStats stats() const;

 private:
  void take_back(std::unique_ptr<Link> link, std::uint64_t generation);
  void drop_idle();  // lock held

  Open open_;
  std::size_t links_max_;
  mutable std::mutex mutex_;
  std::condition_variable returned_;
  std::vector<std::unique_ptr<Link>> idle_;
  std::size_t lent_ = 0;
  // Of lent links that had been here before; at most links_max_. A link counts without atomics while somebody reads through
  // it, so nobody else may look.
  std::vector<std::pair<const Link*, LinkStats>> away_;
  std::uint64_t generation_ = 0;
  bool closed_ = false;
  LinkStats dropped_;
};

LinkStats operator+(const LinkStats& a, const LinkStats& b);

}  // namespace paramwire
