// Package wsframe knows WebSocket frame headers (RFC 6455 section 5.2) and
// nothing of what is in the frames: a Parser that follows a byte stream from
// boundary to boundary, encoders for control frames, and Pipe, a relay for one
// direction of a socket that can place a control frame between two others.
//
// The gateway relays clients' sockets with it: it can answer a ping, ask with
// one, or close with a code, and knows when it cannot because it was cut
// inside a frame.
package wsframe
