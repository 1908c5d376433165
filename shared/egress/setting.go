package egress

import (
	"bytes"
	"encoding/json"
)

// Type is how a connection leaves: through which kind of proxy, or straight.
type Type string

// The types (spec "Proxy setting"). None stands in lists only.
const (
	None        Type = "none"
	Residential Type = "residential"
	Datacenter  Type = "datacenter"
	Custom      Type = "custom"
)

// Platform says whether the type is one that Berth's providers serve: what the
// plan's monthly data allowance counts.
func (t Type) Platform() bool { return t == Residential || t == Datacenter }

// Proxied says whether bytes of the type are proxy data.
func (t Type) Proxied() bool { return t.Platform() || t == Custom }

// Rotation says how long a proxy keeps the address it leaves from.
type Rotation string

// The rotations.
const (
	Sticky   Rotation = "sticky"   // one address until a new one is asked for
	Rotating Rotation = "rotating" // a new address for each connection
)

// Scope says whose traffic a setting is for.
type Scope string

// The scopes.
const (
	ScopeBrowser Scope = "browser" // Chrome's alone
	ScopeAll     Scope = "all"     // the shell's too
)

// Bounds of a setting (spec "Limits").
const (
	MaxRules   = 10  // of a list
	MaxPattern = 256 // characters of a domainPattern
)

// Rule is one proxy of a setting, with the sites it is for. Which fields a type
// may have is ParseSetting's to say; the zero value of a field is "not given".
type Rule struct {
	Type          Type     `json:"type"`
	Country       string   `json:"country,omitempty"` // ISO 3166-1, upper case
	State         string   `json:"state,omitempty"`   // us_new_york
	City          string   `json:"city,omitempty"`    // new_york
	IP            Rotation `json:"ip,omitempty"`
	Scope         Scope    `json:"scope,omitempty"`
	Server        string   `json:"server,omitempty"` // http://host:port or https://host:port
	Username      string   `json:"username,omitempty"`
	DomainPattern string   `json:"domainPattern,omitempty"` // RE2; empty: every site

	// Password is in the clear only between a request and its sealing; it is
	// never written as JSON.
	Password string `json:"-"`
	// Sealed is the password as the record keeps it, readable by gateway and
	// proxyd alone (proxylink.SealPassword).
	Sealed []byte `json:"sealed,omitempty"`
}

// Setting is a session's proxy setting with defaults filled in: one proxy, or a
// list of rules of which the first that matches a connection's host serves it.
// A nil *Setting means no proxy.
type Setting struct {
	Rules []Rule `json:"rules"`          // one where List is false
	List  bool   `json:"list,omitempty"` // it was given, and is shown, as a list
}

// Scope is the one on which all rules agree.
func (s *Setting) Scope() Scope {
	if s != nil {
		for _, r := range s.Rules {
			if r.Scope != "" {
				return r.Scope
			}
		}
	}
	return ScopeBrowser
}

// Platform says whether a rule leads through a provider of the platform: then
// plan and allowance have their say.
func (s *Setting) Platform() bool {
	if s != nil {
		for _, r := range s.Rules {
			if r.Type.Platform() {
				return true
			}
		}
	}
	return false
}

// Shown is the setting as the API shows it, an object, a list or null: without
// any password.
func (s *Setting) Shown() json.RawMessage {
	if s == nil {
		return json.RawMessage("null")
	}
	bare := s.Bare()
	var shown any = bare.Rules
	if !bare.List {
		shown = bare.Rules[0]
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // patterns stay readable
	if err := enc.Encode(shown); err != nil {
		panic("egress: " + err.Error()) // a struct of texts always encodes
	}
	return bytes.TrimRight(b.Bytes(), "\n")
}

// Bare is a copy of the setting without passwords, sealed or not; nil of nil.
func (s *Setting) Bare() *Setting {
	if s == nil {
		return nil
	}
	bare := &Setting{Rules: make([]Rule, len(s.Rules)), List: s.List}
	for i, r := range s.Rules {
		r.Password, r.Sealed = "", nil
		bare.Rules[i] = r
	}
	return bare
}

// String is for logs, which print structs whole: no password gets there.
func (r Rule) String() string {
	return string((&Setting{Rules: []Rule{r}}).Shown())
}
