#include "paramwire/compute/backend.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/compute/cpu_backend.hpp"
#include "paramwire/compute/cuda_probe.hpp"

namespace paramwire {

std::vector<Availability> available_backends() { return {cpu_backend_available(), cuda_availability(look_for_cuda(""))}; }

Result<std::unique_ptr<Backend>> open_backend(std::string_view spec, const BackendOptions& options) {
  if (spec == "cpu") return open_cpu_backend(options);
  return Error(Code::kInvalid, cat("backend '", spec, "' is unknown; expected cpu"));
}

}  // namespace paramwire
