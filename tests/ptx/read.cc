/* read.cc - the text of PTX, an entry at a time, to instructions that are decoded */

#include "opcodes.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <unordered_map>
#include <unordered_set>

namespace ptx {

std::vector<const opcode *> all_opcodes() {
    std::vector<const opcode *> all;
    for (const opcode *table : {ARITHMETIC, CONTROL, MEMORY, ASYNC})
        for (; table->name; table++) all.push_back(table);
    return all;
}

static bool is_arithmetic(const opcode *one) {
    const opcode *end = ARITHMETIC;
    while (end->name) end++;
    return one >= ARITHMETIC && one < end;
}

static const opcode *find_opcode(const std::string &name) {
    static std::unordered_map<std::string, const opcode *> known;
    if (known.empty())
        for (const opcode *one : all_opcodes()) known[one->name] = one;
    const auto found = known.find(name);
    return found == known.end() ? nullptr : found->second;
}

namespace {

const char *const SPECIAL[SPECIAL_REGISTERS] = {"%tid.x",    "%tid.y",    "%tid.z",   "%ntid.x",  "%ntid.y",
                                                "%ntid.z",   "%ctaid.x",  "%ctaid.y", "%ctaid.z", "%nctaid.x",
                                                "%nctaid.y", "%nctaid.z", "%laneid"};

/* Instructions whose operands PTX lets a program leave out, or add, and the number that is understood here. */
const std::pair<const char *, uint32_t> SOLE_FORMS[] = {
    {"shfl.", 6}, {"cp.async.cg", 4}, {"mbarrier.arrive.shared", 1}, {"mbarrier.arrive.expect_tx", 2}};

struct register_name {
    uint32_t place;
    int bytes; /* of a lane; 0: a predicate */
};

struct operand {
    enum { VALUE, LIST, ADDRESS, SINK } kind = VALUE;
    std::vector<std::string> names; /* of a value, a list's members, or an address and the list after it */
    int64_t offset = 0;
};

struct reader {
    module &from;
    const std::string &text;
    kernel &k;
    size_t at, end;
    std::vector<std::unordered_map<std::string, register_name>> scopes;
    std::unordered_map<std::string, int> ranges;       /* "%f": bytes */
    std::unordered_map<std::string, uint64_t> symbols; /* what an address of them is */
    std::unordered_map<std::string, int> labels;
    std::vector<std::pair<size_t, std::string>> jumps;
    std::map<std::pair<uint64_t, int>, uint32_t> constants;
    std::map<std::string, std::pair<uint32_t, uint32_t>> shared_of_module; /* bytes, alignment */
    std::string dynamic_shared;
    uint32_t next_predicate = 0, predicates_end = 0;
    int line = 0;

    reader(module &all, kernel &to) : from(all), text(all.text), k(to), at(0), end(all.text.size()) {
        k.register_bytes = SPECIAL_REGISTERS * LANES * 4;
    }

    [[noreturn]] void fail(const std::string &what) { refuse_text(k.name, line, what); }

    /* ---- characters and words ---- */

    void skip_space() {
        for (; at < end; at++) {
            if (text[at] == '/' && text[at + 1] == '/') at = std::min(text.find('\n', at), end - 1);
            if (text[at] == '\n') line++;
            if (!isspace((unsigned char)text[at])) return;
        }
    }

    bool take(char c) {
        skip_space();
        if (at >= end || text[at] != c) return false;
        at++;
        return true;
    }

    void must(char c) {
        if (!take(c)) fail(std::string("no '") + c + "' before: " + text.substr(at, 30));
    }

    std::string word() {
        skip_space();
        const size_t start = at;
        while (at < end && (isalnum((unsigned char)text[at]) || strchr("_$%.-", text[at]))) at++;
        return text.substr(start, at - start);
    }

    std::string opcode_word() {
        skip_space();
        const size_t start = at;
        while (at < end && !isspace((unsigned char)text[at]) && text[at] != ';') at++;
        return text.substr(start, at - start);
    }

    int64_t whole() { return whole(word()); }

    int64_t whole(const std::string &x) {
        char *rest = nullptr;
        const int64_t value = (int64_t)strtoull(x.c_str(), &rest, 0);
        if (x.empty() || *rest) fail("\"" + x + "\" is no number");
        return value;
    }

    /* ---- declarations ---- */

    /* Bytes of a lane's number in a register: 4 for ".b8" and ".b16" as well. */
    static int bytes_of(const std::string &type) {
        if (type == ".pred") return 0;
        const int bits = atoi(type.c_str() + 2);
        return bits < 32 ? 4 : bits / 8;
    }

    static uint32_t size_of(const std::string &type) { return (uint32_t)atoi(type.c_str() + 2) / 8; }

    uint32_t new_place(int bytes) {
        if (bytes == 0) {
            if (next_predicate == predicates_end) {
                next_predicate = k.register_bytes;
                k.register_bytes = predicates_end = next_predicate + 64;
            }
            next_predicate += 4;
            return next_predicate - 4;
        }
        k.register_bytes += (uint32_t)(LANES * bytes);
        return k.register_bytes - (uint32_t)(LANES * bytes);
    }

    void read_registers() {
        const int bytes = bytes_of(word());
        do {
            const std::string name = word();
            if (take('<')) {
                whole();
                must('>');
                ranges[name] = bytes;
            } else scopes.back()[name] = {new_place(bytes), bytes};
        } while (take(','));
    }

    /* "[.extern] .shared .align 16 .b8 name[64]" and the like, from after the space's name on. */
    void read_variable(const std::string &space, bool in_module) {
        uint32_t alignment = 1;
        std::string type = word();
        if (type == ".align") {
            alignment = (uint32_t)whole();
            type = word();
        }
        const std::string name = word();
        uint32_t bytes = size_of(type);
        bool is_open = false;
        if (take('[')) {
            is_open = take(']');
            if (!is_open) {
                bytes *= (uint32_t)whole();
                must(']');
            }
        }
        if (space == ".global") read_global(name, type, bytes, in_module);
        else if (space == ".shared" && is_open) dynamic_shared = name;
        else if (space == ".shared" && in_module) shared_of_module[name] = {bytes, alignment};
        else if (space == ".shared") place_shared(name, bytes, alignment);
        else if (space == ".local") {
            k.local_bytes = (k.local_bytes + alignment - 1) / alignment * alignment;
            symbols[name] = k.local_bytes;
            k.local_bytes += bytes;
        } else fail("a variable in " + space);
    }

    void place_shared(const std::string &name, uint32_t bytes, uint32_t alignment) {
        k.static_shared = (k.static_shared + alignment - 1) / alignment * alignment;
        symbols[name] = k.static_shared;
        k.static_shared += bytes;
    }

    /* A variable stays for ever; one of the module is the same for all its entries. */
    void read_global(const std::string &name, const std::string &type, uint32_t bytes, bool in_module) {
        const auto known = from.globals.find(name);
        if (in_module && known != from.globals.end()) {
            symbols[name] = known->second;
            return;
        }
        unsigned char *place = new_global(bytes);
        if (take('=')) {
            if (type != ".b8") fail("values of a variable of " + type);
            must('{');
            uint32_t n = 0;
            do {
                const int64_t value = whole();
                if (n == bytes) fail("more values than " + std::to_string(bytes) + " bytes");
                if (value < -128 || value > 255) fail(std::to_string(value) + " is no byte");
                place[n++] = (unsigned char)value;
            } while (take(','));
            must('}');
        }
        /* The fault that is planted, in a program that holds several (tests/ptx/ptx_faults.py). */
        const char *planted = getenv("PTX_PLANTED");
        const int number = planted ? atoi(planted) : 0;
        if (name.find("ptx_planted") != std::string::npos) memcpy(place, &number, sizeof number);
        symbols[name] = (uint64_t)place;
        if (in_module) from.globals[name] = (uint64_t)place;
    }

    /* ---- operands ---- */

    std::string name_or_number() {
        if (take('!')) return "!" + word();
        return word();
    }

    operand read_operand() {
        operand o;
        if (take('{')) {
            o.kind = operand::LIST;
            do o.names.push_back(word());
            while (take(','));
            must('}');
        } else if (take('[')) {
            o.kind = operand::ADDRESS;
            o.names.push_back(word());
            if (take('+')) o.offset = whole();
            if (take(',')) {
                const operand coordinates = read_operand();
                o.names.insert(o.names.end(), coordinates.names.begin(), coordinates.names.end());
            }
            must(']');
        } else {
            o.names.push_back(name_or_number());
            if (o.names[0] == "_") o.kind = operand::SINK;
            if (take('|')) o.names.push_back(word());
        }
        return o;
    }

    const register_name *find_register(const std::string &name) {
        for (size_t s = scopes.size(); s-- > 0;) {
            const auto found = scopes[s].find(name);
            if (found != scopes[s].end()) return &found->second;
        }
        size_t digits = name.size();
        while (digits > 0 && isdigit((unsigned char)name[digits - 1])) digits--;
        const auto range = ranges.find(name.substr(0, digits));
        if (range == ranges.end() || digits == name.size()) return nullptr;
        return &(scopes[0][name] = {new_place(range->second), range->second});
    }

    uint32_t constant(uint64_t value, int bytes) {
        const auto found = constants.find({value, bytes});
        if (found != constants.end()) return found->second;
        const uint32_t place = (uint32_t)k.constants.size() | IS_CONSTANT;
        constants[{value, bytes}] = place;
        for (int l = 0; l < std::max(bytes * LANES / 4, 16); l += bytes == 8 ? 2 : 1)
            k.constants.insert(k.constants.end(), (unsigned char *)&value,
                               (unsigned char *)&value + (bytes == 8 ? 8 : 4));
        return place;
    }

    /* The place of a name or number; `bytes` of a number's lane, 0: of a predicate. A register of 16 bits has 32 here,
       of which the upper ones are zero, and so has a number. */
    uint32_t place_of(const std::string &name, int bytes) {
        if (name.empty()) fail("no operand");
        if (name[0] == '0' && (name[1] == 'f' || name[1] == 'd')) {
            if (name.size() != (name[1] == 'f' ? 10 : 18) || (bytes == 4) != (name[1] == 'f'))
                fail("\"" + name + "\" is of another width");
            return constant((uint64_t)whole("0x" + name.substr(2)), bytes);
        }
        if (isdigit((unsigned char)name[0]) || name[0] == '-') {
            const uint64_t value = (uint64_t)whole(name);
            if (bytes == 0) return constant(value ? ALL_LANES : 0, 4);
            const uint64_t mask = bytes == 2 ? 0xFFFF : bytes == 4 ? ALL_LANES : ~(uint64_t)0;
            return constant(value & mask, std::max(bytes, 4));
        }
        if (const register_name *r = find_register(name)) return r->place;
        for (int i = 0; i < SPECIAL_REGISTERS; i++)
            if (name == SPECIAL[i]) return (uint32_t)(i * LANES * 4);
        if (!find_symbol(name)) fail("nothing is called \"" + name + "\"");
        return constant(symbols[name], std::max(bytes, 4));
    }

    bool find_symbol(const std::string &name) {
        const auto shared = shared_of_module.find(name);
        if (shared != shared_of_module.end() && symbols.find(name) == symbols.end())
            place_shared(name, shared->second.first, shared->second.second);
        return symbols.find(name) != symbols.end();
    }

    bool is_wide(const std::string &name) {
        const register_name *r = find_register(name);
        return r && r->bytes == 8;
    }

    /* ---- statements ---- */

    static bool begins(const std::string &name, const char *with) {
        return name[0] == with[0] && name.compare(0, strlen(with), with) == 0;
    }

    /* Bytes of a lane of an instruction's operand by the instruction's name; 0: of a predicate. */
    static int operand_bytes(const std::string &name, size_t index) {
        const size_t last = name.rfind('.'), before = name.rfind('.', last - 1);
        const std::string type = name.substr(last + 1);
        const int bytes = type == "pred" ? 0 : type.find("64") != std::string::npos ? 8 : 4;
        for (const char *all_32 : {"mbarrier", "cp.", "bar.", "wgmma", "setmaxnreg"})
            if (begins(name, all_32)) return 4;
        if (begins(name, "setp")) return index == 0 ? 0 : bytes;
        if (begins(name, "selp")) return index == 3 ? 0 : bytes;
        if (begins(name, "cvt."))
            return index == 0 && name.substr(before, last - before).find("64") != std::string::npos ? 8
                   : index == 0                                                                     ? 4
                                                                                                    : bytes;
        if (begins(name, "shl") || begins(name, "shr")) return index == 2 ? 4 : bytes;
        if (begins(name, "bfi")) return index >= 3 ? 4 : bytes;
        if (begins(name, "mul.wide") || begins(name, "mad.wide")) return index % 3 == 0 && type != "u16" ? 8 : 4;
        return bytes;
    }

    /* Returns whether a number among the operands is of 16 bits; a shift's distance is of 32. */
    static bool is_short(const std::string &name, size_t index) {
        if (begins(name, "sh")) return index != 2 && name.compare(name.size() - 2, 2, "16") == 0;
        for (const char *type : {".b16", ".u16", ".s16"})
            if (name.size() > 4 && name.compare(name.size() - 4, 4, type) == 0) return true;
        return false;
    }

    /* Registers are as wide as the instruction's type says. */
    void check_widths(const std::string &name, const std::vector<operand> &operands) {
        for (size_t n = 0; n < operands.size(); n++) {
            if (operands[n].kind != operand::VALUE || operands[n].names.size() != 1) continue;
            const register_name *r = find_register(operands[n].names[0]);
            if (r && r->bytes != operand_bytes(name, n))
                fail("operand " + std::to_string(n) + " of " + name + " is of another width");
        }
    }

    /* Loads and stores are found by their type alone. */
    const opcode *find_access(const std::string &name, const std::vector<operand> &operands, instruction *i) {
        static const std::pair<const char *, space> SPACES[] = {
            {".global", GLOBAL}, {".shared", SHARED}, {".local", LOCAL}, {".param", PARAM}};
        const std::string kind = name.substr(0, 2), type = name.substr(name.rfind('.') + 1);
        std::string rest = name.substr(2, name.rfind('.') - 2);
        i->space = GENERIC;
        for (const auto &one : SPACES)
            if (rest.compare(0, strlen(one.first), one.first) == 0) {
                i->space = one.second;
                rest = rest.substr(strlen(one.first));
            }
        if (rest.compare(0, 3, ".nc") == 0) rest = rest.substr(3);
        i->vector = rest == ".v2" ? 2 : rest == ".v4" ? 4 : 1;
        if (!rest.empty() && i->vector == 1) return nullptr;
        const operand &moved = operands[kind == "ld" ? 0 : 1];
        const bool wide = bytes_of('.' + type) == 4 && is_wide(moved.names[0]);
        for (const std::string &one : moved.names) {
            const register_name *r = find_register(one);
            if (r && r->bytes != (wide ? 8 : bytes_of('.' + type)))
                fail("\"" + one + "\" of " + name + " is of another width");
        }
        if (moved.names.size() != i->vector) fail(name + " of " + std::to_string(moved.names.size()) + " registers");
        const opcode *found = find_opcode(kind + (wide ? " wide " : " ") + type);
        if (found) i->outputs = kind == "ld" ? i->vector : 0;
        i->name = keep(name + (wide ? " wide" : ""));
        return found;
    }

    const opcode *find_instruction(const std::string &name, const std::vector<operand> &operands, instruction *i) {
        if (begins(name, "ld.") || begins(name, "st.")) return find_access(name, operands, i);
        std::string full = name;
        if (name == "mov.b32" || name == "mov.b64") {
            if (operands[0].kind == operand::LIST) full += " {}";
            else if (operands[1].kind == operand::LIST) full += " = {}";
        }
        const bool narrows = begins(name, "cvt.") && operand_bytes(name, 1) == 4 && is_wide(operands[1].names[0]);
        const opcode *found = find_opcode(narrows ? full + " wide" : full);
        if (!found) return nullptr;
        if (is_arithmetic(found) && full == name && !narrows) check_widths(name, operands);
        i->space = found->space;
        i->vector = found->vector;
        i->outputs = (uint8_t)found->outputs;
        i->name = found->name;
        return found;
    }

    void add_operand(const std::string &name, const operand &o, size_t index, instruction *i) {
        if (o.kind == operand::SINK) return;
        for (size_t n = 0; n < o.names.size(); n++) {
            const std::string &one = o.names[n];
            int bytes = operand_bytes(name, index);
            if (o.kind == operand::LIST && name == "mov.b64") bytes = 4;
            else if ((o.kind == operand::LIST && name == "mov.b32") || is_short(name, index)) bytes = 2;
            if (o.kind == operand::ADDRESS && n == 0) {
                const bool known = find_register(one) != nullptr;
                if (o.offset != 0 && begins(name, "cp.")) fail("an offset in " + name);
                if (o.offset != (int32_t)o.offset) fail("the offset " + std::to_string(o.offset));
                if (o.offset != 0) i->offset = (int32_t)o.offset;
                if (!i->wide_address) i->wide_address = known ? is_wide(one) : true;
                if (known) k.places.push_back(place_of(one, 8));
                else {
                    if (!find_symbol(one)) fail("nothing is called \"" + one + "\"");
                    i->wide_address = true;
                    k.places.push_back(constant(symbols[one], 8));
                }
                continue;
            }
            k.places.push_back(place_of(one, bytes));
        }
    }

    void read_instruction() {
        instruction i = {};
        i.guard = NO_PLACE;
        i.line = line;
        if (take('@')) {
            i.guard_negated = take('!');
            i.guard = place_of(word(), 0);
        }
        const std::string name = opcode_word();
        std::vector<operand> operands;
        i.more = (uint32_t)k.places.size();
        if (name == "bra" || name == "bra.uni") jumps.emplace_back(k.code.size(), word());
        else if (!take(';')) {
            do operands.push_back(read_operand());
            while (take(','));
            must(';');
        }
        if (name == "bra" || name == "bra.uni") must(';');
        const opcode *found = find_instruction(name, operands, &i);
        if (!found) fail("unknown instruction " + name);
        for (size_t n = 0; n < operands.size(); n++) add_operand(name, operands[n], n, &i);
        i.run = found->run;
        i.needs = (uint8_t)found->needs;
        i.bytes = found->bytes;
        i.n = (uint32_t)k.places.size() - i.more;
        for (const auto &one : SOLE_FORMS)
            if (begins(name, one.first) && i.n != one.second) fail(name + " of " + std::to_string(i.n) + " operands");
        uint32_t *const first[] = {&i.d, &i.a, &i.b, &i.c};
        for (uint32_t n = 0; n < 4; n++) *first[n] = n < i.n ? k.places[i.more + n] : NO_PLACE;
        if (begins(name, "wgmma.mma")) i.bytes_of_wgmma = found->bytes;
        for (const char *one : {"wgmma", "mbarrier", "cp.async.bulk", "fence.proxy", "setmaxnreg"})
            if (begins(name, one)) k.has_wgmma = true;
        for (const char *one : {"wgmma", "mbarrier", "cp.async"})
            if (begins(name, one)) k.has_async = true;
        k.code.push_back(i);
    }

    static const char *keep(const std::string &name) {
        static std::unordered_set<std::string> names; /* which keeps them where they are */
        return names.insert(name).first->c_str();
    }

    void read_body() {
        must('{');
        scopes.resize(1);
        while (!scopes.empty()) {
            if (take('{')) scopes.emplace_back();
            else if (take('}')) scopes.pop_back();
            else if (skip_space(), text[at] == '.') {
                const std::string kind = word();
                if (kind == ".reg") read_registers();
                else if (kind == ".pragma") at = text.find(';', at);
                else read_variable(kind, false);
                must(';');
            } else if (text[at] == '$') {
                labels[word()] = (int)k.code.size();
                must(':');
            } else read_instruction();
        }
        for (const auto &jump : jumps) {
            if (labels.find(jump.second) == labels.end()) fail("no label " + jump.second);
            k.code[jump.first].target = labels[jump.second];
        }
    }

    /* "(.param .u64 name, .param .align 8 .b8 name[72])" and what stands before the body. */
    void read_head() {
        uint32_t bytes = 0;
        std::vector<std::pair<std::string, uint32_t>> names;
        must('(');
        while (!take(')')) {
            if (word() != ".param") fail("no .param");
            std::string type = word();
            uint32_t alignment = 0, count = 1;
            if (type == ".align") {
                alignment = (uint32_t)whole();
                type = word();
            }
            const std::string name = word();
            if (take('[')) {
                count = (uint32_t)whole();
                must(']');
            }
            if (alignment == 0) alignment = size_of(type);
            bytes = (bytes + alignment - 1) / alignment * alignment;
            names.emplace_back(name, bytes);
            k.parameters.push_back({bytes, count * size_of(type)});
            bytes += count * size_of(type);
            take(',');
        }
        /* Tensor maps among the parameters lie at multiples of 64 bytes on a device. */
        k.parameter_values.resize(bytes + 128);
        k.parameters_at = (unsigned char *)(((uintptr_t)k.parameter_values.data() + 127) / 128 * 128);
        k.parameter_bytes = bytes;
        for (const auto &one : names) symbols[one.first] = (uint64_t)k.parameters_at + one.second;
        while (skip_space(), text[at] == '.') {
            const std::string kind = word();
            const int64_t value = whole();
            if (kind == ".maxntid") k.max_threads = (int)value;
            while (take(',')) k.max_threads *= (int)whole();
        }
    }

    void read_module_variables() {
        for (const text_place &place : from.variables) {
            at = place.at, line = place.line;
            std::string kind = word();
            if (kind == ".extern" || kind == ".visible") kind = word();
            if (kind == ".shared" || kind == ".global") read_variable(kind, true);
        }
    }

    void read_entry(const text_place &place) {
        read_module_variables();
        at = place.at, line = place.line;
        symbols[dynamic_shared] = 0;
        read_head();
        const size_t body = at;
        if (!dynamic_shared.empty() && has_static_shared(body)) fail("static and dynamic shared memory in one entry");
        read_body();
        k.dynamic_shared_at = k.static_shared;
        k.constants.resize(k.constants.size() + 64);
        k.constants_at = (char *)(((uintptr_t)k.constants.data() + 63) / 64 * 64);
        memmove(k.constants_at, k.constants.data(), k.constants.size() - 64);
        if (options().fuse) fuse_products();
    }

    /* Symbols of shared memory are placed as they are met, so that one open array is at 0 only where it is alone. */
    bool has_static_shared(size_t body) {
        const size_t stop_at = text.find(".entry", body);
        const std::string all = text.substr(body, stop_at == std::string::npos ? stop_at : stop_at - body);
        if (all.find(dynamic_shared) == std::string::npos) return false;
        for (const auto &one : shared_of_module)
            if (all.find(one.first) != std::string::npos) return true;
        return all.find("\t.shared ") != std::string::npos;
    }

    void fuse_products();
};

/* As ptxas: a product without a rounding in its name whose only use is a sum without one, in the same basic block,
   becomes a fused one. */
void reader::fuse_products() {
    std::map<uint32_t, int> uses;
    std::vector<bool> starts(k.code.size() + 1);
    for (const instruction &i : k.code)
        for (uint32_t n = 0; n < i.n; n++) uses[k.places[i.more + n]]++;
    for (const auto &label : labels) starts[(size_t)label.second] = true;
    std::map<uint32_t, size_t> products; /* by the place of the result */
    for (size_t n = 0; n < k.code.size(); n++) {
        instruction &i = k.code[n];
        if (starts[n] || i.target != 0) products.clear();
        const bool sum = strcmp(i.name, "add.f32") == 0, difference = strcmp(i.name, "sub.f32") == 0;
        if (sum || difference)
            for (const bool second : {false, true}) {
                const auto found = products.find(second ? i.b : i.a);
                if (found == products.end() || uses[found->first] != 2) continue;
                const instruction &product = k.code[found->second];
                const uint32_t other = second ? i.a : i.b;
                i.run = sum ? fused : second ? fused_from : fused_minus;
                i.a = product.a, i.b = product.b, i.c = other;
                i.name = "fma of a product and a sum";
                break;
            }
        for (uint32_t o = 0; o < i.outputs; o++) { /* an operand of a product may be overwritten */
            const uint32_t written = k.places[i.more + o];
            for (auto p = products.begin(); p != products.end();)
                p = k.code[p->second].a == written || k.code[p->second].b == written ? products.erase(p) : std::next(p);
        }
        if (strcmp(i.name, "mul.f32") == 0 && i.guard == NO_PLACE) products[i.d] = n;
    }
}

} /* namespace */

const std::map<std::string, text_place> &entries_of(module &m) {
    static const std::string HEADS[] = {".entry ", ".visible .entry "};
    int line = 1;
    if (!m.entries.empty()) return m.entries;
    for (size_t at = 0, next; at < m.text.size(); at = next + 1, line++) {
        next = std::min(m.text.find('\n', at), m.text.size());
        if (m.text[at] != '.') continue;
        m.variables.push_back({at, line});
        for (const std::string &head : HEADS)
            if (m.text.compare(at, head.size(), head) == 0) {
                const size_t name = at + head.size(), end = m.text.find('(', name);
                m.entries[m.text.substr(name, end - name)] = {end, line};
            }
    }
    return m.entries;
}

const kernel *find_kernel(module &m, const std::string &name) {
    std::unique_ptr<kernel> &k = m.kernels[name];
    const auto place = entries_of(m).find(name);
    if (k || place == m.entries.end()) return k.get();
    k.reset(new kernel);
    k->name = name;
    reader(m, *k).read_entry(place->second);
    return k.get();
}

} /* namespace ptx */
