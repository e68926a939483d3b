// A C++ file that uses the library; the implementation may have been compiled as C or as C++.

#include "chunkflow.h"

#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
    const std::vector<std::int64_t> lengths{5, 4, 3};
    cf_pack_desc pack = cf_pack_desc();
    pack.chunk_size = 8;
    cf_plan *plan = nullptr;
    cf_error error;
    if (cf_pack(lengths.data(), static_cast<std::int64_t>(lengths.size()), &pack, &plan, &error) != CF_OK) return 1;
    std::printf("chunks %d\n", static_cast<int>(plan->n_chunks));
    cf_plan_free(plan);
    return 0;
}
