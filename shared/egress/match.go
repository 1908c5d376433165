package egress

import (
	"fmt"
	"regexp"
	"strings"
	"sync"
)

// cachedHosts is how many verdicts each of a Matcher's two generations holds.
const cachedHosts = 256

// Matcher tells which rule a connection's host follows. Make one for a pass
// and keep it. Safe for concurrent use.
type Matcher struct {
	patterns []*regexp.Regexp // of the rules in order; nil matches every host, and then is the last
	verdicts verdicts
}

// NewMatcher compiles rules that ParseSetting accepted; the error names one
// that it would not have. No rules match nothing.
func NewMatcher(rules []Rule) (*Matcher, error) {
	m := &Matcher{}
	for i, r := range rules {
		if r.DomainPattern == "" {
			m.patterns = append(m.patterns, nil)
			break // what follows is never reached
		}
		re, err := compile(r.DomainPattern)
		if err != nil {
			return nil, fmt.Errorf("rule %d: domainPattern must be a regular expression (RE2): %w", i, err)
		}
		m.patterns = append(m.patterns, re)
	}
	return m, nil
}

// Match gives the index of the first rule for a host, or ok false: then the
// connection goes straight out. host is a name or an address as Target.Host
// gives it; a trailing dot, brackets and case make no difference.
func (m *Matcher) Match(host string) (i int, ok bool) {
	switch {
	case len(m.patterns) == 0:
		return 0, false
	case m.patterns[0] == nil:
		return 0, true
	}
	verdict, known := m.verdicts.get(host)
	if !known {
		verdict = m.first(bare(host))
		m.verdicts.put(host, verdict)
	}
	return max(verdict, 0), verdict >= 0
}

const noRule = -1

func (m *Matcher) first(host string) int {
	for i, re := range m.patterns {
		if re == nil || re.MatchString(host) {
			return i
		}
	}
	return noRule
}

// bare is a host without trailing dot or brackets.
func bare(host string) string {
	if inner, ok := strings.CutPrefix(host, "["); ok && strings.HasSuffix(inner, "]") {
		return strings.TrimSuffix(inner, "]")
	}
	return strings.TrimSuffix(host, ".")
}

// verdicts remembers the rules of hosts. When the young generation is full it
// becomes the old one, and the old one goes: a page that makes names up cannot
// fill the memory. The zero value is empty.
type verdicts struct {
	mu         sync.RWMutex
	young, old map[string]int // guarded by mu
}

func (v *verdicts) get(host string) (verdict int, ok bool) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	if verdict, ok = v.young[host]; !ok {
		verdict, ok = v.old[host]
	}
	return verdict, ok
}

func (v *verdicts) put(host string, verdict int) {
	if len(host) > maxHost+len("[].") {
		return // no host of a target: not worth the memory
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.young == nil || len(v.young) >= cachedHosts {
		v.young, v.old = make(map[string]int, 8), v.young
	}
	v.young[strings.Clone(host)] = verdict // host may be a piece of a large buffer
}
