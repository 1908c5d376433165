package agentlink

// What is the same inside every machine, whatever runs it. Image, agent,
// slots and drivers must agree on these.
const (
	UserName   = "user" // the ordinary user: shells, files, Chrome
	UserUID    = 1000
	UserGID    = 1000
	BrowserGID = 900 // Chrome's own primary group, "browser"; nftables lets it reach loopback and EgressAddr only
	Workspace  = "/workspace"
	Downloads  = "/workspace/downloads"

	// SlotAddr is the slot's own address (link-local, on lo inside the slot):
	// hostd listens there for the machine.
	SlotAddr   = "169.254.77.1"
	EgressPort = 78 // HTTP proxy and SOCKS5, tunnelled to proxyd; below 80, where nothing in the machine may listen
	DNSPort    = 53
)
